"""Looking inside."""

from vitrail.look.draw import as_text, overlay, sheet
from vitrail.look.record import Recording, Seen, attention_layers, record

__all__ = ["Recording", "Seen", "as_text", "attention_layers", "overlay", "record", "sheet"]
