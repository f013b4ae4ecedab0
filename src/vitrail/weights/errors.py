"""What goes wrong with weights, for the person who asked for them."""


class LoadError(ValueError):
    """Weights cannot be read as what they are said to be; nothing was loaded."""


class SaveError(ValueError):
    """A model cannot be written there, or not in that form; nothing was changed."""


class LoadWarning(UserWarning):
    """A load that worked, but not as the file alone says: a new head, resized positions, a guess."""
