//! Words of comments: the subject of a sentence is a noun.
//!
//! The words `who`, `whoever`, `whatever` and `what` stand for a noun that the reader has to guess, and so do `such` and
//! `of which` at the beginning of a sentence. A question may begin with them.

use crate::files::{rust_files, workspace};

/// Words that stand for a noun wherever they are.
const ANYWHERE: [&str; 4] = ["who", "whoever", "whatever", "what"];
/// Beginnings of sentences that leave the subject open.
const AT_BEGINNING: [&str; 2] = ["such ", "of which "];

/// Lines of comments in the crate `name` with such a word, as `file:line: text`.
///
/// # Panics
/// When a file cannot be read.
#[must_use]
pub fn of_crate(name: &str) -> Vec<String> {
    let folder = workspace().join("crates").join(name);
    let mut found = Vec::new();
    for path in rust_files(&folder) {
        let text = std::fs::read_to_string(&path).expect("the sources can be read");
        let file = path.strip_prefix(&folder).expect("the file lies there");
        for (at, line) in text.lines().enumerate() {
            if comment(line).is_some_and(is_open) {
                found.push(format!(
                    "{name}/{}:{}: {}",
                    file.display(),
                    at + 1,
                    line.trim()
                ));
            }
        }
    }
    found
}

/// The text of a line that is a comment.
fn comment(line: &str) -> Option<&str> {
    let text = line.trim_start().strip_prefix("//")?;
    Some(text.trim_start_matches(['/', '!']).trim())
}

/// Whether the subject of a sentence in `text` is left open.
pub(crate) fn is_open(text: &str) -> bool {
    // Code between backticks is no English.
    let plain: Vec<_> = text.split('`').step_by(2).collect();
    let plain = plain.join("_").to_lowercase();
    let is_of_a_word = |c: char| !c.is_alphanumeric() && c != '\'' && c != '_';
    let mut words = plain.split(is_of_a_word);
    if words.any(|word| ANYWHERE.contains(&word)) && !plain.ends_with('?') {
        return true;
    }
    let mut sentences = plain.split(". ").map(str::trim_start);
    sentences.any(|sentence| AT_BEGINNING.iter().any(|begin| sentence.starts_with(begin)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentence_without_a_noun_as_its_subject_is_found() {
        assert!(is_open("Whoever asks waits."));
        assert!(is_open("It keeps what was read."));
        assert!(is_open("A leaf. Such are dropped."));
        assert!(!is_open("The reader waits. `what` is a name."));
        assert!(!is_open("And then what?"));
    }
}
