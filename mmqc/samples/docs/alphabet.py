"""The characters of docs-vqa, one token each: printable ASCII, and those of six more languages that DejaVu and STIX hold."""

from __future__ import annotations

ASCII = "".join(map(chr, range(32, 127)))
ACCENTED = "ÄÖÜäöüßÀÂÇÉÈÊËÎÏÔŒÙÛàâçéèêëîïôœùûÁÍÑÓÚáíñóú¿¡ĄĆĘŁŃŚŹŻąćęłńśźż"
GREEK = "".join(chr(c) for c in range(0x391, 0x3CA) if c != 0x3A2 and not 0x3AA <= c <= 0x3B0) + "άέήίόύώ"
CYRILLIC = "".join(map(chr, range(0x410, 0x450)))
SIGNS = "€£°§–…«»·×½"
CHARACTERS = "\n" + ASCII + ACCENTED + GREEK + CYRILLIC + SIGNS

SPECIAL = ("<|pad|>", "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PAD, END, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
VOCAB_SIZE = 304  # 294 are used; no linear of the model has 304 rows or columns
PATCH, MERGE, TEMPORAL = 8, 2, 2
CELL = PATCH * MERGE  # a visual token's side in pixels

TOKEN = {character: len(SPECIAL) + i for i, character in enumerate(CHARACTERS)}
