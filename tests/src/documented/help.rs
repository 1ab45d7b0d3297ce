//! The examples of a help text.

use super::markdown::Block;

/// Returns the commands below the line "Examples:" of the output of `mqblk ... --help`, each as a block of language
/// `sh`. They are indented by two blanks. A line with a deeper indentation explains the one before, unless that ends
/// with a backslash. `page` is the name of the help text.
#[must_use]
pub fn examples(page: &str, text: &str) -> Vec<Block> {
    let mut found: Vec<Block> = Vec::new();
    let mut continued = false;
    let lines = text.lines().enumerate().skip_while(|(_, line)| line.trim() != "Examples:").skip(1);
    for (index, line) in lines {
        let code = line.trim_start();
        match line.len() - code.len() {
            _ if code.is_empty() => continued = false,
            0 => break,
            _ if continued => {
                if let Some(last) = found.last_mut() {
                    last.text.push_str(line);
                    last.text.push('\n');
                }
                continued = line.ends_with('\\');
            }
            2 => {
                found.push(Block {
                    page: page.to_owned(),
                    section: "Examples".to_owned(),
                    language: "sh".to_owned(),
                    line: index + 1,
                    text: format!("{code}\n"),
                });
                continued = line.ends_with('\\');
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_what_stands_below_their_heading() {
        let text = "Does it\n\n  mqblk not this\n\nExamples:\n\n  mqblk a \\\n      --b c\n      explains\n  truncate d\n\n  mqblk e\n\
                    \nExit code: 0\n  mqblk nor this\n";
        let found = examples("mqblk --help", text);
        let lines: Vec<(usize, &str)> = found.iter().map(|block| (block.line, &*block.text)).collect();
        assert_eq!(lines, [(7, "mqblk a \\\n      --b c\n"), (10, "truncate d\n"), (12, "mqblk e\n")]);
        assert_eq!(found[1].place(), "mqblk --help:10");
        assert!(examples("x", "nothing\n").is_empty());
    }

    /// A reader would paste two commands.
    #[test]
    fn a_command_that_is_wrapped_without_a_backslash_is_cut() {
        let found = examples("x", "Examples:\n  mqblk bench --disk a\n  --iodepth 1\n");
        let commands: Vec<&str> = found.iter().map(|block| &*block.text).collect();
        assert_eq!(commands, ["mqblk bench --disk a\n", "--iodepth 1\n"]);
    }
}
