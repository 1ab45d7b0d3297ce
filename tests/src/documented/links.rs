//! Checks that references of documents exist: links, anchors, and paths of the repository.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::markdown::{Part, anchor, parse};

/// Returns the broken links and paths of a page, a line with its position for each. `root` is the repository; `files`
/// are all its files and folders, relative to it; `page` is one of them.
#[must_use]
pub fn faults(root: &Path, files: &BTreeSet<PathBuf>, page: &str, text: &str) -> Vec<String> {
    let parts = match parse(page, text) {
        Ok(parts) => parts,
        Err(error) => return vec![error],
    };
    let mut faults = Vec::new();
    for (number, part) in &parts {
        match part {
            Part::Heading(_, line) | Part::Text(line) => {
                let mut add = |found: String| faults.push(format!("{page}:{number}: {found}"));
                links(line).iter().filter_map(|link| judge_link(root, files, page, text, link)).for_each(&mut add);
                code_spans(line).iter().flat_map(|span| paths(files, span)).for_each(&mut add);
            }
            Part::Block(block) if block.language == "sh" => {
                for (index, line) in block.text.lines().enumerate() {
                    let found = paths(files, line).into_iter();
                    faults.extend(found.map(|found| format!("{page}:{}: {found}", block.line + index)));
                }
            }
            Part::Block(_) => {}
        }
    }
    faults
}

/// Returns all files and folders of the repository except those that are built, downloaded or hidden.
///
/// # Errors
/// When a folder cannot be read.
pub fn files(root: &Path) -> std::io::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root.join(&folder))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            let name = entry.file_name();
            let hidden = name.to_string_lossy().starts_with('.')
                && folder.as_os_str().is_empty()
                && name != ".ci"
                && name != ".cargo";
            if hidden || path == Path::new("target") {
                continue;
            }
            if entry.file_type()?.is_dir() {
                folders.push(path.clone());
            }
            found.insert(path);
        }
    }
    Ok(found)
}

/// Returns the targets of the Markdown links of a line.
fn links(line: &str) -> Vec<&str> {
    let outside: Vec<&str> = line.split('`').step_by(2).collect();
    // A link's text may be code, so only targets within code are left out.
    let mut found = Vec::new();
    let mut rest = line;
    while let Some((_, after)) = rest.split_once("](") {
        let Some((target, more)) = after.split_once(')') else { break };
        if outside.iter().any(|text| text.contains(&format!("]({target})"))) {
            found.push(target.split_whitespace().next().unwrap_or_default());
        }
        rest = more;
    }
    found
}

fn judge_link(root: &Path, files: &BTreeSet<PathBuf>, page: &str, text: &str, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, fragment) = link.split_once('#').map_or((link, None), |(path, fragment)| (path, Some(fragment)));
    let target = if path.is_empty() {
        PathBuf::from(page)
    } else {
        let target = normal(&Path::new(page).parent().unwrap_or(Path::new("")).join(path));
        if !target.as_os_str().is_empty() && !files.contains(&target) {
            return Some(format!("found a link to {link}, expected something that is there"));
        }
        target
    };
    let fragment = fragment?;
    let other;
    let text = if target == Path::new(page) {
        text
    } else {
        other = std::fs::read_to_string(root.join(&target)).unwrap_or_default();
        &other
    };
    let parts = parse(&target.to_string_lossy(), text).unwrap_or_default();
    let known = parts.iter().any(|(_, part)| matches!(part, Part::Heading(_, title) if anchor(title) == fragment));
    (!known).then(|| format!("found a link to {link}, expected a heading of that name in {}", target.display()))
}

/// Returns a path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::Normal(name) => out.push(name),
            _ => {}
        }
    }
    out
}

/// Returns the text between backticks.
fn code_spans(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// Returns the faults of words in code that look like paths of the repository: they begin with one of its folders, or
/// end with `.rs`.
fn paths(files: &BTreeSet<PathBuf>, code: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    for word in code.split(|letter: char| letter.is_whitespace() || "=,;()'\"".contains(letter)) {
        let word = word.trim_end_matches(['.', ':']);
        let word = word.strip_prefix("./").unwrap_or(word);
        // A pattern, a placeholder, or a path with a variable.
        if word.starts_with('/') || word.contains(['*', '<', '>', '{', '$', '[', '…']) || word.contains("...") {
            continue;
        }
        let word =
            word.rsplit_once(':').filter(|(_, line)| line.parse::<usize>().is_ok()).map_or(word, |(path, _)| path);
        let there = match word.split_once('/') {
            Some((folder, _)) if is_folder(files, Path::new(folder)) => {
                let path = normal(Path::new(word));
                files.contains(&path) && (!word.ends_with('/') || is_folder(files, &path))
            }
            Some(_) if word.ends_with(".rs") => files.iter().any(|file| file.ends_with(word)),
            None if word.ends_with(".rs") && word.len() > 3 => files.iter().any(|file| file.ends_with(word)),
            _ => true,
        };
        if !there {
            wrong.push(format!("found the path {word}, expected one that is there"));
        }
    }
    wrong
}

fn is_folder(files: &BTreeSet<PathBuf>, path: &Path) -> bool {
    let mut inside = files.range(path.to_path_buf()..);
    inside.any(|file| file != path && file.starts_with(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository() -> (tempfile::TempDir, BTreeSet<PathBuf>) {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("core/src")).unwrap();
        std::fs::create_dir_all(root.path().join("docs")).unwrap();
        std::fs::create_dir_all(root.path().join("target/docs")).unwrap();
        std::fs::write(root.path().join("core/src/queue.rs"), "").unwrap();
        std::fs::write(root.path().join("docs/serve.md"), "# Serve\n\n## A `LUN`\n").unwrap();
        let files = files(root.path()).unwrap();
        (root, files)
    }

    #[test]
    fn what_is_there_is_right() {
        let (root, files) = repository();
        assert!(!files.contains(Path::new("target")));
        let text = "# Here\n[a](serve.md) [`b`](serve.md#a-lun) [c](../core/) [d](#here) [e](https://x.y/z#q) `[f](g)`\n\
                    `core/src/queue.rs`, `core/src/`, `queue.rs:12`, `core/*/x`, `read/write`, `/core/a`, `src/queue.rs`, `.rs`\n\
                    ```sh\ncat core/src/queue.rs >core/$x target/y\n```\n```text\ncore/none\n```\n";
        assert_eq!(faults(root.path(), &files, "docs/page.md", text), [""; 0]);
    }

    #[test]
    fn what_is_not_there_is_found() {
        let (root, files) = repository();
        let text = "[a](sreve.md)\n[b](serve.md#lun)\n[c](#nowhere)\n`core/src/qeue.rs` and `nothing.rs`\n\n```sh\nls\ncat core/x/\n```\n`core/src/queue.rs/`\n";
        assert_eq!(
            faults(root.path(), &files, "docs/page.md", text),
            [
                "docs/page.md:1: found a link to sreve.md, expected something that is there",
                "docs/page.md:2: found a link to serve.md#lun, expected a heading of that name in docs/serve.md",
                "docs/page.md:3: found a link to #nowhere, expected a heading of that name in docs/page.md",
                "docs/page.md:4: found the path core/src/qeue.rs, expected one that is there",
                "docs/page.md:4: found the path nothing.rs, expected one that is there",
                "docs/page.md:8: found the path core/x/, expected one that is there",
                "docs/page.md:10: found the path core/src/queue.rs/, expected one that is there",
            ]
        );
    }
}
