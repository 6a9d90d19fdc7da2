"""The exceptions that users may want to catch."""


class ConvArgumentError(ValueError, RuntimeError):
    """A refused argument. Both a ``ValueError``, as numpy users expect, and a ``RuntimeError``, as torch raises."""


class BackendError(RuntimeError):
    """A device or its software is missing; the text says what and how to get it."""


class DeviceMemoryError(MemoryError):
    """The device has too little memory; the text says how much was asked and how much is free."""
