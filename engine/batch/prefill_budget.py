"""How much of the prompts of a batch is read between two of its rounds."""


class PrefillBudget:
    """Room for one chunk of a prompt, which chunks of several short ones may share.

    A chunk is read as a whole, or waits: where chunks end may decide the last bits.
    """

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def fits(self, chunk: int) -> bool:
        """Take the room for a chunk of so many tokens, if there is as much."""
        if chunk > self._left:
            return False
        self._left -= chunk
        return True
