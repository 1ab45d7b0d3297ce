//! Tables of results, as text, Markdown and HTML.

use std::fmt::Write as _;

use crate::grid::{Heading, format_grid};
use crate::plot::markup_text;
use crate::report::ResultRow;

/// A table.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ResultTable {
    pub title: String,
    /// Headings of the columns.
    pub headings: Vec<String>,
    /// Number of leading columns with names. The others are numbers, aligned to the right.
    pub names: usize,
    /// Rows, with a cell for each heading.
    pub rows: Vec<Vec<String>>,
}

/// Arranges rows in tables: `line` and `column` name a row's line and column. Both keep the order of the rows.
pub(super) struct Pivot<'a> {
    /// The rows.
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
    pub(super) fn table(
        &self,
        title: impl Into<String>,
        cell: &dyn Fn(&ResultRow, &[&ResultRow]) -> String,
    ) -> ResultTable {
        let mut columns: Vec<String> = vec![];
        let mut lines: Vec<(String, Vec<&ResultRow>)> = vec![];
        for &row in self.rows {
            let (line, column) = ((self.line)(row), (self.column)(row));
            if !columns.contains(&column) {
                columns.push(column);
            }
            match lines.iter_mut().find(|(name, _)| *name == line) {
                Some((_, rows)) => rows.push(row),
                None => lines.push((line, vec![row])),
            }
        }
        let cells = |(name, line): (String, Vec<&ResultRow>)| {
            let of = |column: &String| line.iter().find(|row| (self.column)(row) == *column);
            let cells = columns.iter().map(|column| of(column).map_or("-".into(), |row| cell(row, &line)));
            std::iter::once(name).chain(cells).collect()
        };
        let rows = lines.into_iter().map(cells).collect();
        let headings = std::iter::once(self.heading.to_owned()).chain(columns.iter().cloned()).collect();
        ResultTable { title: title.into(), headings, names: usize::from(!self.numbers), rows }
    }
}

impl ResultTable {
    /// Creates a table without rows.
    pub(super) fn new(title: impl Into<String>, names: usize, headings: &[&str]) -> ResultTable {
        let headings = headings.iter().map(|text| (*text).to_owned()).collect();
        ResultTable { title: title.into(), headings, names, rows: vec![] }
    }

    /// Returns the table with more columns at its right. `cells` gets the name of a line.
    pub(super) fn with_columns<const N: usize>(
        mut self,
        headings: [&str; N],
        cells: impl Fn(&str) -> [String; N],
    ) -> ResultTable {
        self.headings.extend(headings.map(str::to_owned));
        self.rows.iter_mut().for_each(|row| row.extend(cells(&row[0])));
        self
    }

    /// Returns the table with another line below. `cell` gets the heading of a column.
    pub(super) fn with_line(mut self, name: &str, cell: impl Fn(&str) -> String) -> ResultTable {
        let cells = self.headings[1..].iter().map(|heading| cell(heading));
        self.rows.push(std::iter::once(name.to_owned()).chain(cells).collect());
        self
    }

    /// Returns the table as text of aligned columns.
    pub(crate) fn text(&self) -> String {
        let heading = |(at, text): (usize, &String)| Heading { text: text.clone(), number: at >= self.names };
        let headings: Vec<Heading> = self.headings.iter().enumerate().map(heading).collect();
        format!("{}\n{}", self.title, format_grid(&headings, &self.rows))
    }

    /// Returns the table as Markdown.
    pub(crate) fn markdown(&self) -> String {
        let cells =
            |cells: &[String]| cells.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>().join(" | ");
        let rule: Vec<&str> = (0..self.headings.len()).map(|at| if at < self.names { "---" } else { "---:" }).collect();
        let mut text = format!("### {}\n\n| {} |\n| {} |\n", self.title, cells(&self.headings), rule.join(" | "));
        for row in &self.rows {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "| {} |", cells(row));
        }
        text
    }

    /// Returns the table as HTML.
    pub(crate) fn html(&self) -> String {
        let class = |at: usize| if at < self.names { "" } else { " class=\"number\"" };
        let line = |tag: &str, cells: &[String]| {
            let cells = cells.iter().enumerate();
            let cells: String =
                cells.map(|(at, cell)| format!("<{tag}{}>{}</{tag}>", class(at), markup_text(cell))).collect();
            format!("<tr>{cells}</tr>\n")
        };
        let body: String = self.rows.iter().map(|row| line("td", row)).collect();
        let (title, head) = (markup_text(&self.title), line("th", &self.headings));
        format!("<table>\n<caption>{title}</caption>\n<thead>\n{head}</thead>\n<tbody>\n{body}</tbody>\n</table>\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_three_forms() {
        let mut table = ResultTable::new("IOPS", 1, &["poll", "ratio"]);
        table.rows.push(vec!["a|<b>".into(), "1.00".into()]);
        assert_eq!(table.text(), "IOPS\npoll   ratio\na|<b>   1.00\n");
        assert_eq!(table.markdown(), "### IOPS\n\n| poll | ratio |\n| --- | ---: |\n| a\\|<b> | 1.00 |\n");
        let html = table.html();
        assert!(html.contains("<td>a|&lt;b&gt;</td><td class=\"number\">1.00</td>"), "{html}");
    }
}
