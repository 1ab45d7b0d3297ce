//! Tables of results, as text, Markdown and HTML.

use std::fmt::Write as _;

use crate::grid::{Heading, format_grid};
use crate::plot::markup_text;

/// A table.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ResultTable {
    /// What it has.
    pub title: String,
    /// Headings of the columns.
    pub headings: Vec<String>,
    /// How many of the first columns are names; the others are numbers, and aligned to the right.
    pub names: usize,
    /// Rows, with a cell for each heading.
    pub rows: Vec<Vec<String>>,
}

impl ResultTable {
    /// Creates a table without rows.
    pub(super) fn new(title: impl Into<String>, names: usize, headings: &[&str]) -> ResultTable {
        let headings = headings.iter().map(|text| (*text).to_owned()).collect();
        ResultTable { title: title.into(), headings, names, rows: vec![] }
    }

    /// Returns the table as text of aligned columns.
    pub(super) fn text(&self) -> String {
        let heading = |(at, text): (usize, &String)| Heading { text: text.clone(), number: at >= self.names };
        let headings: Vec<Heading> = self.headings.iter().enumerate().map(heading).collect();
        format!("{}\n{}", self.title, format_grid(&headings, &self.rows))
    }

    /// Returns the table as Markdown.
    pub(super) fn markdown(&self) -> String {
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
    pub(super) fn html(&self) -> String {
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
