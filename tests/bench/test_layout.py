"""Tables as text."""

from bench import text_tables

CELLS = [["size", "us"], ["8 B", "12.5"], ["64 MB", "7"]]


def test_columns_stand_under_each_other():
    assert text_tables.plain(CELLS) == [" size    us", "  8 B  12.5", "64 MB     7"]


def test_a_document_has_names_on_the_left():
    assert text_tables.markdown(CELLS) == [
        "| size  |   us |",
        "| ----- | ---: |",
        "| 8 B   | 12.5 |",
        "| 64 MB |    7 |",
    ]
