"""Names of emoji, as captions."""

from lightning_dalle.optional import require


def emoji_names() -> dict[str, str]:
    """The caption of each fully qualified emoji without a skin tone.

    Raises:
        ModuleNotFoundError: the extra `quickstart` is not installed.
    """
    emoji = require("emoji", "quickstart")
    names = {}
    for characters, entry in emoji.EMOJI_DATA.items():
        caption = " ".join(entry["en"].strip(":").replace("_", " ").lower().split())
        if entry["status"] == emoji.STATUS["fully_qualified"] and "skin tone" not in caption:
            names[characters] = caption
    return names
