"""Tables as text."""

from bench import layout

CELLS = [["size", "us"], ["8 B", "12.5"], ["64 MB", "7"]]


def test_columns_stand_under_each_other():
    assert layout.plain(CELLS) == [" size    us", "  8 B  12.5", "64 MB     7"]


def test_a_document_has_names_on_the_left():
    assert layout.markdown(CELLS) == ["| size  |   us |", "| ----- | ---: |", "| 8 B   | 12.5 |", "| 64 MB |    7 |"]
