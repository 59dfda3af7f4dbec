"""The modes of each kind of block that are worth compiling, and what becomes of them."""
