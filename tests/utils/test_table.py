from fastinfer.utils.table import format_table


def test_table_aligns_columns() -> None:
    assert format_table([["name", "us"], ["a", "12.5"], ["longer", "3"]]) == "name      us\na       12.5\nlonger     3"
