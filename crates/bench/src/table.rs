//! Tables of results, as text, Markdown and HTML, and their cells.

use std::fmt::Write as _;

use crate::plot::markup_text;
use crate::report::ResultRow;

/// A column's heading.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Heading {
    pub text: String,
    /// Numbers are aligned to the right.
    pub number: bool,
}

/// A table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ResultTable {
    pub title: String,
    /// Headings of the columns.
    pub headings: Vec<Heading>,
    /// Rows, with a cell for each heading.
    pub rows: Vec<Vec<String>>,
}

/// A column of a table that has a line for each row: its heading, and what makes its cells.
pub(crate) type Column<'a> = (&'a str, &'a dyn Fn(&ResultRow) -> String);

impl ResultTable {
    /// Creates a table. The first `names` columns are names, the others numbers.
    pub(crate) fn new(
        title: impl Into<String>,
        names: usize,
        headings: &[&str],
        rows: Vec<Vec<String>>,
    ) -> ResultTable {
        let heading = |(at, text): (usize, &&str)| Heading { text: (*text).to_owned(), number: at >= names };
        ResultTable { title: title.into(), headings: headings.iter().enumerate().map(heading).collect(), rows }
    }

    /// Creates a table with a line for each of `rows`.
    pub(crate) fn of_rows(
        title: impl Into<String>,
        names: usize,
        columns: &[Column<'_>],
        rows: &[&ResultRow],
    ) -> ResultTable {
        let headings: Vec<&str> = columns.iter().map(|(heading, _)| *heading).collect();
        let cells = |row: &&ResultRow| columns.iter().map(|(_, cell)| cell(row)).collect();
        ResultTable::new(title, names, &headings, rows.iter().map(cells).collect())
    }

    /// Returns the table with more columns at its right. `cells` gets the name of a line; `None` is dashes.
    pub(crate) fn with_columns<const N: usize>(
        mut self,
        headings: [&str; N],
        cells: impl Fn(&str) -> Option<[String; N]>,
    ) -> ResultTable {
        self.headings.extend(headings.map(|text| Heading { text: text.to_owned(), number: true }));
        self.rows.iter_mut().for_each(|row| row.extend(cells(&row[0]).unwrap_or(["-"; N].map(str::to_owned))));
        self
    }

    /// Returns the table with another line below. `cell` gets the heading of a column.
    pub(crate) fn with_line(mut self, name: &str, cell: impl Fn(&str) -> String) -> ResultTable {
        let cells = self.headings[1..].iter().map(|heading| cell(&heading.text));
        self.rows.push(std::iter::once(name.to_owned()).chain(cells).collect());
        self
    }

    /// Returns the texts of the headings.
    fn texts(&self) -> Vec<String> {
        self.headings.iter().map(|heading| heading.text.clone()).collect()
    }

    /// Returns the table as text of aligned columns.
    pub(crate) fn text(&self) -> String {
        let lines = || std::iter::once(self.texts()).chain(self.rows.iter().cloned());
        let width = |at: usize| lines().map(|line| line[at].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.headings.len()).map(width).collect();
        let mut text = format!("{}\n", self.title);
        for line in lines() {
            let cells = line.iter().zip(&self.headings).zip(&widths);
            let cells = cells.map(|((cell, heading), width)| match heading.number {
                true => format!("{cell:>width$}  "),
                false => format!("{cell:<width$}  "),
            });
            text.push_str(cells.collect::<String>().trim_end());
            text.push('\n');
        }
        text
    }

    /// Returns the table as Markdown.
    pub(crate) fn markdown(&self) -> String {
        let cells =
            |cells: &[String]| cells.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>().join(" | ");
        let rule: Vec<&str> = self.headings.iter().map(|heading| if heading.number { "---:" } else { "---" }).collect();
        let mut text = format!("### {}\n\n| {} |\n| {} |\n", self.title, cells(&self.texts()), rule.join(" | "));
        for row in &self.rows {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "| {} |", cells(row));
        }
        text
    }

    /// Returns the table as HTML.
    pub(crate) fn html(&self) -> String {
        let line = |tag: &str, cells: &[String]| {
            let cells = cells.iter().zip(&self.headings).map(|(cell, heading)| {
                let class = if heading.number { " class=\"number\"" } else { "" };
                format!("<{tag}{class}>{}</{tag}>", markup_text(cell))
            });
            format!("<tr>{}</tr>\n", cells.collect::<String>())
        };
        let body: String = self.rows.iter().map(|row| line("td", row)).collect();
        let (title, head) = (markup_text(&self.title), line("th", &self.texts()));
        format!("<table>\n<caption>{title}</caption>\n<thead>\n{head}</thead>\n<tbody>\n{body}</tbody>\n</table>\n")
    }
}

/// Arranges rows in tables: `line` and `column` name a row's line and column. Both keep the order of the rows.
pub(crate) struct Pivot<'a> {
    pub rows: &'a [&'a ResultRow],
    /// Heading of the lines' names.
    pub heading: &'a str,
    /// Returns the name of a row's line.
    pub line: &'a dyn Fn(&ResultRow) -> String,
    /// Returns the heading of a row's column.
    pub column: &'a dyn Fn(&ResultRow) -> String,
    /// True if names are numbers.
    pub numbers: bool,
}

impl Pivot<'_> {
    /// Returns a table. A cell gets its row, and all rows of its line.
    pub(crate) fn table(
        &self,
        title: impl Into<String>,
        cell: &dyn Fn(&ResultRow, &[&ResultRow]) -> String,
    ) -> ResultTable {
        let rows = || self.rows.iter().copied();
        let columns: Vec<String> = groups(rows(), self.column).iter().map(|column| (self.column)(column[0])).collect();
        let cells = |line: Vec<&ResultRow>| {
            let find = |column: &String| line.iter().find(|row| (self.column)(row) == *column);
            let cells = columns.iter().map(|column| or_dash(find(column).map(|row| cell(row, &line))));
            std::iter::once((self.line)(line[0])).chain(cells).collect()
        };
        let lines = groups(rows(), self.line).into_iter().map(cells).collect();
        let headings: Vec<&str> = std::iter::once(self.heading).chain(columns.iter().map(String::as_str)).collect();
        ResultTable::new(title, usize::from(!self.numbers), &headings, lines)
    }
}

/// Returns the rows of each value of `of`, in the order of the rows.
pub(crate) fn groups<'a, T: PartialEq>(
    rows: impl IntoIterator<Item = &'a ResultRow>,
    of: impl Fn(&ResultRow) -> T,
) -> Vec<Vec<&'a ResultRow>> {
    let mut groups: Vec<Vec<&ResultRow>> = vec![];
    for row in rows {
        match groups.iter_mut().find(|group| of(group[0]) == of(row)) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups
}

/// Returns a number with three significant digits, with at most two decimals.
pub(crate) fn three_digits(value: f64) -> String {
    match value {
        // A value that rounds up to the next power of ten has its decimals.
        v if v >= 99.95 => format!("{v:.0}"),
        v if v >= 9.995 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// Returns a count with three significant digits and the suffix of thousands or millions, K or M.
pub(crate) fn with_suffix(value: f64) -> String {
    match value {
        // A value that rounds up to the next suffix gets it.
        v if v >= 999_500.0 => format!("{}M", three_digits(v / 1e6)),
        v if v >= 999.5 => format!("{}K", three_digits(v / 1e3)),
        v => format!("{v:.0}"),
    }
}

/// Returns bytes per second in MiB/s, with three significant digits.
pub(crate) fn mebibytes(bytes: f64) -> String {
    three_digits(bytes / f64::from(1 << 20))
}

/// Returns a value as text, or a dash.
pub(crate) fn or_dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

/// Returns a ratio as a cell. In a short run no I/O may have completed: a ratio to 0 is a dash.
pub(crate) fn ratio_cell(ratio: Option<f64>) -> String {
    or_dash(ratio.filter(|ratio| ratio.is_finite()).map(three_digits))
}

/// Returns CPU time for an I/O as a cell.
pub(crate) fn cpu_cell(us: Option<f64>) -> String {
    or_dash(us.map(|us| format!("{us:.2}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_three_digits() {
        for (value, text) in [
            (0.0, "0"),
            (12.4, "12"),
            (999.0, "999"),
            (999.7, "1.00K"),
            (1534.0, "1.53K"),
            (11_260.0, "11.3K"),
            (158_000.0, "158K"),
            (999_400.0, "999K"),
            (999_700.0, "1.00M"),
            (3_530_904.0, "3.53M"),
            (20_000_000.0, "20.0M"),
        ] {
            assert_eq!(with_suffix(value), text);
        }
    }

    #[test]
    fn numbers_stand_at_the_right() {
        let rows = vec![vec!["a".to_owned(), "1000".to_owned()], vec!["long".to_owned(), "1".to_owned()]];
        let table = ResultTable::new("title", 1, &["x", "n"], rows);
        assert_eq!(table.text(), "title\nx        n\na     1000\nlong     1\n");
    }

    #[test]
    fn a_table_has_three_forms() {
        let table = ResultTable::new("IOPS", 1, &["poll", "ratio"], vec![vec!["a|<b>".into(), "1.00".into()]]);
        assert_eq!(table.text(), "IOPS\npoll   ratio\na|<b>   1.00\n");
        assert_eq!(table.markdown(), "### IOPS\n\n| poll | ratio |\n| --- | ---: |\n| a\\|<b> | 1.00 |\n");
        let html = table.html();
        assert!(html.contains("<td>a|&lt;b&gt;</td><td class=\"number\">1.00</td>"), "{html}");
    }
}
