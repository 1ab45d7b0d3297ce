//! The relevant parts of a Markdown page: headings, code blocks, and other lines.

/// A part of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// A heading: its level, and its text.
    Heading(usize, String),
    /// A line of text.
    Text(String),
    /// A code block.
    Block(Block),
}

/// A code block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The page, relative to the repository.
    pub page: String,
    /// The second-level heading above it; empty before the first.
    pub section: String,
    /// The language of its fence.
    pub language: String,
    /// The number of its first line of code.
    pub line: usize,
    /// The code.
    pub text: String,
}

impl Block {
    /// Page and line, as compilers write it.
    #[must_use]
    pub fn place(&self) -> String {
        format!("{}:{}", self.page, self.line)
    }
}

/// Returns the parts of a page, each with the number of its first line.
///
/// # Errors
/// A block that is never closed, with its position.
pub fn parse(page: &str, text: &str) -> Result<Vec<(usize, Part)>, String> {
    let mut parts = Vec::new();
    let mut section = String::new();
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line));
    while let Some((number, line)) = lines.next() {
        let trimmed = line.trim_start();
        if let Some(language) = trimmed.strip_prefix("```") {
            let indent = line.len() - trimmed.len();
            let mut code = String::new();
            loop {
                let Some((_, line)) = lines.next() else {
                    return Err(format!("{page}:{number}: found a code block without an end, expected ```"));
                };
                if line.trim() == "```" {
                    break;
                }
                // A block in a list has the indentation of the list.
                let blanks = line.len() - line.trim_start_matches(' ').len();
                code.push_str(&line[blanks.min(indent)..]);
                code.push('\n');
            }
            let (page, section, language) = (page.to_owned(), section.clone(), language.trim().to_owned());
            parts.push((number, Part::Block(Block { page, section, language, line: number + 1, text: code })));
            continue;
        }
        let depth = line.len() - line.trim_start_matches('#').len();
        match line[depth..].strip_prefix(' ') {
            Some(title) if (1..=6).contains(&depth) => {
                if depth == 2 {
                    title.clone_into(&mut section);
                }
                parts.push((number, Part::Heading(depth, title.trim().to_owned())));
            }
            _ => parts.push((number, Part::Text(line.to_owned()))),
        }
    }
    Ok(parts)
}

/// Returns the code blocks of a page.
///
/// # Errors
/// As [`parse`].
pub fn blocks(page: &str, text: &str) -> Result<Vec<Block>, String> {
    let block = |(_, part)| if let Part::Block(block) = part { Some(block) } else { None };
    Ok(parse(page, text)?.into_iter().filter_map(block).collect())
}

/// Returns the anchor of a heading in a link, as GitHub makes it.
#[must_use]
pub fn anchor(heading: &str) -> String {
    let mut anchor = String::new();
    for letter in heading.chars() {
        match letter {
            ' ' | '-' => anchor.push('-'),
            '_' => anchor.push('_'),
            _ if letter.is_alphanumeric() => anchor.extend(letter.to_lowercase()),
            _ => {}
        }
    }
    anchor
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Title\n\nText with `code`.\n\n## First part\n\n```sh\nmqblk serve \\\n  --disk a\n# a comment, no heading\n```\n\
                        - in a list:\n\n  ```text\n  found\n    more\n  ```\n\n### Deeper\n\n```\nplain\n```\n";

    #[test]
    fn blocks_have_their_place() {
        let found = blocks("docs/page.md", PAGE).unwrap();
        assert_eq!(found.len(), 3);
        assert_eq!(found[0].place(), "docs/page.md:8");
        assert_eq!((&*found[0].section, &*found[0].language), ("First part", "sh"));
        assert_eq!(found[0].text, "mqblk serve \\\n  --disk a\n# a comment, no heading\n");
        assert_eq!((found[1].line, &*found[1].text), (15, "found\n  more\n"));
        // A deeper heading belongs to the same section.
        assert_eq!((&*found[2].section, &*found[2].language, found[2].line), ("First part", "", 22));
    }

    #[test]
    fn headings_are_no_comments() {
        let parts = parse("a.md", "#!/bin/sh\n####### seven\n## Two `words`\n").unwrap();
        let headings: Vec<_> = parts.iter().filter(|(_, part)| matches!(part, Part::Heading(..))).collect();
        assert_eq!(headings, [&(3, Part::Heading(2, "Two `words`".into()))]);
    }

    #[test]
    fn a_block_without_an_end_is_told_of() {
        assert_eq!(
            parse("a.md", "text\n\n```sh\nls\n").unwrap_err(),
            "a.md:3: found a code block without an end, expected ```"
        );
    }

    #[test]
    fn anchors_are_as_github_makes_them() {
        for (heading, want) in [
            ("LUNs over a restart", "luns-over-a-restart"),
            ("A disk's interface", "a-disks-interface"),
            ("`lun.add`", "lunadd"),
            ("mqblk stat", "mqblk-stat"),
            ("One, two: three_four - five", "one-two-three_four---five"),
        ] {
            assert_eq!(anchor(heading), want);
        }
    }
}
