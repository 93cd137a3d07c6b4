//! Documents: their words, their lines, and the files that they name.
//!
//! Text inside of fences is shown as it is and not judged. A row of a table and a line with one picture cannot be wrapped.

use std::path::{Path, PathBuf};

use crate::files::{rust_files, workspace};
use crate::words::is_open;

/// Longest line of a document, in characters.
const LINE_MAX: usize = 100;
/// Documents outside of `docs`.
const AT_TOP: [&str; 4] = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
];

/// A document of the workspace.
pub struct Document {
    /// Its path below the workspace.
    pub path: PathBuf,
    text: String,
}

/// All documents, sorted by path.
///
/// # Panics
/// When a folder or file cannot be read.
#[must_use]
pub fn documents() -> Vec<Document> {
    let top = workspace();
    let mut paths: Vec<PathBuf> = AT_TOP.iter().map(PathBuf::from).collect();
    let mut folders = vec![PathBuf::from("docs")];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(top.join(&folder)).expect("the documents can be read");
        for entry in entries {
            let entry = entry.expect("the documents can be read");
            let path = folder.join(entry.file_name());
            if entry.path().is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "md") {
                paths.push(path);
            }
        }
    }
    paths.sort();
    let read = |path: PathBuf| Document {
        text: std::fs::read_to_string(top.join(&path)).expect("the documents can be read"),
        path,
    };
    paths.into_iter().map(read).collect()
}

impl Document {
    /// Lines in which the subject of a sentence is no noun, as `file:line: text`.
    #[must_use]
    pub fn open_subjects(&self) -> Vec<String> {
        self.lines_that(is_open)
    }

    /// Lines that could be wrapped and are too long.
    #[must_use]
    pub fn long_lines(&self) -> Vec<String> {
        self.lines_that(|line| line.chars().count() > LINE_MAX && !is_whole(line))
    }

    /// Files and folders that the document names or links to, and that do not exist.
    ///
    /// The path of a Rust file may begin at any folder above it, that of a folder of sources begins at the workspace or at
    /// `crates`.
    ///
    /// # Panics
    /// When the sources cannot be read.
    #[must_use]
    pub fn lost_files(&self) -> Vec<String> {
        let sources = rust_files(&workspace());
        let mut lost = Vec::new();
        for (number, line) in prose(&self.text) {
            let named = code_spans(line).filter(|name| !is_known(name, &sources));
            let linked = links(line).filter(|target| !self.leads_somewhere(target));
            for name in named.chain(linked) {
                lost.push(format!("{}:{number}: {name}", self.path.display()));
            }
        }
        lost
    }

    /// Terms that the document defines at the beginning of a line, in bold, in lower case.
    #[must_use]
    pub fn terms(&self) -> Vec<String> {
        let defined = prose(&self.text).filter_map(|(_, line)| line.strip_prefix("**"));
        let terms = defined.filter_map(|rest| rest.split_once("** — "));
        terms.map(|(term, _)| term.to_lowercase()).collect()
    }

    /// Files that a table of steps (`| file | step |`) names twice: a way down visits each file once.
    #[must_use]
    pub fn visited_twice(&self) -> Vec<String> {
        let mut twice = Vec::new();
        let mut visited: Option<Vec<&str>> = None;
        for (number, line) in prose(&self.text) {
            match &mut visited {
                _ if line == "| file | step |" => visited = Some(Vec::new()),
                Some(_) if !line.starts_with('|') => visited = None,
                Some(visited) => {
                    let file = code_spans(line).next().unwrap_or_default();
                    if visited.contains(&file) {
                        twice.push(format!("{}:{number}: {file}", self.path.display()));
                    }
                    visited.push(file);
                }
                None => {}
            }
        }
        twice
    }

    fn leads_somewhere(&self, target: &str) -> bool {
        let file = target.split('#').next().expect("a split has a first part");
        let folder = self.path.parent().expect("a document lies in a folder");
        target.contains("://") || workspace().join(folder).join(file).exists()
    }

    fn lines_that(&self, is_found: impl Fn(&str) -> bool) -> Vec<String> {
        let found = prose(&self.text).filter(|(_, line)| is_found(line));
        let told = found.map(|(number, line)| format!("{}:{number}: {line}", self.path.display()));
        told.collect()
    }
}

/// Lines outside of fences, with their numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_fenced = false;
    (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_fenced ^= is_fence;
        !is_fenced && !is_fence
    })
}

/// Whether a line cannot be wrapped.
fn is_whole(line: &str) -> bool {
    line.starts_with('|') || line.starts_with("![")
}

/// Texts between backticks.
fn code_spans(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

/// Targets of links.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let rests = line.split("](").skip(1);
    rests.filter_map(|rest| rest.split(')').next())
}

/// Whether the text of a code span is no path of a source, or that of one that exists.
fn is_known(name: &str, sources: &[PathBuf]) -> bool {
    let is_of_a_path = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    if !name.chars().all(is_of_a_path) {
        return true;
    }
    if Path::new(name).extension().is_some_and(|kind| kind == "rs") {
        return sources.iter().any(|path| path.ends_with(name));
    }
    let mut folders = name.split('/').skip(1);
    let is_folder = folders.any(|folder| ["src", "tests", "examples"].contains(&folder));
    let top = workspace();
    !is_folder || top.join(name).exists() || top.join("crates").join(name).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(text: &str) -> Document {
        let path = PathBuf::from("docs/some.md");
        let text = text.to_owned();
        Document { path, text }
    }

    #[test]
    fn fences_tables_and_pictures_may_be_long_and_sentences_may_not() {
        let long = "a ".repeat(60);
        let fenced = format!("```text\n{long}\nwho\n```\n");
        let whole = format!("| {long} |\n![{long}](x.svg)\n");
        let document = document(&format!("{fenced}{whole}{long}\nWhoever reads.\n"));
        assert_eq!(document.long_lines(), [format!("docs/some.md:7: {long}")]);
        assert_eq!(document.open_subjects(), ["docs/some.md:8: Whoever reads."]);
    }

    #[test]
    fn file_that_a_table_of_steps_names_twice_is_found() {
        let head = "| file | step |\n| --- | --- |\n";
        let rows = "| `a.rs` | one |\n| `b.rs` | two, as `a.rs` |\n";
        let twice = document(&format!("{head}{rows}\n{head}{rows}| `a.rs` | again |\n"));
        assert_eq!(twice.visited_twice(), ["docs/some.md:10: a.rs"]);
    }

    #[test]
    fn file_that_does_not_exist_is_found() {
        let names = "`crates/house/src/docs.rs` `house/src` `docs.rs` `words -- docs` `a/b`";
        let links = "[here](../README.md#limits) [there](https://example.org/x)";
        assert_eq!(
            document(&format!("{names}\n{links}")).lost_files(),
            Vec::<String>::new()
        );
        let lost = document("`house/src/gone.rs` `gone.rs` `gone/tests` [gone](gone.md)");
        assert_eq!(lost.lost_files().len(), 4);
    }
}
