"""Looking inside."""

from vitrail.look.draw import as_text, overlay, sheet
from vitrail.look.record import attention_layers, record
from vitrail.look.seen import Recording, Seen

__all__ = ["Recording", "Seen", "as_text", "attention_layers", "overlay", "record", "sheet"]
