"""Pictures: what files mean is read, kept while they are filtered, and written; what can't be kept is refused or said.

:mod:`.forms` is the table of formats. :mod:`.files` reads and writes by Pillow and imagecodecs, :mod:`.tiff` by tifffile, and
:mod:`.filtering` filters. :mod:`.bench` measures filters of images.
"""
