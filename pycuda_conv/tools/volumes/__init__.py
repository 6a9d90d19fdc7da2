"""Convolve files stored in chunks: zarr, OME-Zarr, TIFF with several pages, and .npy files together with those.

The files become a dask array, which is convolved (:mod:`pycuda_conv.dask`). One task for each chunk of the result writes it. The tasks run
on threads of this process or on a cluster. The output has a temporary name until it is complete, except in stores that are no folder of
this machine. With ``--resume`` an empty file beside the output records each complete chunk; the others are computed.
"""
