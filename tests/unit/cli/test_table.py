"""Tables keep their cells whole where there is no terminal to fit."""

from coterie.cli.common import table


def test_a_piped_table_is_not_cut_at_eighty_columns(capsys):
    columns = [f"a rather long heading {index}" for index in range(5)]
    table(columns, [[1.23456, "x", 2, "y", 0.5]])
    out = capsys.readouterr().out
    assert all(column in out for column in columns)
    assert "1.235" in out


def test_names_in_brackets_are_no_markup(capsys):
    table(["trace[red]", "b"], [["[bold]x", 1]], title="a[red].npz")
    out = capsys.readouterr().out
    assert all(text in out for text in ("trace[red]", "[bold]x", "a[red].npz"))
