//! Lengths of functions, and methods of types.

use std::collections::BTreeMap;
use std::path::Path;

use crate::files::{rust_files, workspace};
use crate::source::{closing, code, tokens, without_tests};

/// A function of more lines than asked for.
#[derive(Debug)]
pub struct Long {
    /// File and name.
    pub place: String,
    /// Its lines, without comments above it.
    pub lines: usize,
}

/// Functions of the crate that take more than `limit` lines, and the number of methods of each type. Tests are left out.
/// A type whose name stands for several types of the crate is told with its file.
///
/// # Panics
/// When a file cannot be read.
#[must_use]
pub fn of_crate(name: &str, limit: usize) -> (Vec<Long>, BTreeMap<String, usize>) {
    let src = workspace().join("crates").join(name).join("src");
    let mut long = Vec::new();
    let mut methods = BTreeMap::new();
    let homes = homes(&src);
    for path in rust_files(&src) {
        if path.to_string_lossy().contains("tests") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("the sources can be read");
        let (code, _) = without_tests(&code(&text));
        let file = path.strip_prefix(&src).expect("the file lies there");
        let words = tokens(&code);
        let mut owner: Option<(String, usize)> = None;
        for (at, word) in words.iter().enumerate() {
            if owner.as_ref().is_some_and(|(_, end)| word.at > *end) {
                owner = None;
            }
            let is_item = at == 0 || matches!(words[at - 1].text, "}" | ";" | "]" | "{");
            if word.text == "impl" && is_item {
                let head: Vec<_> = words[at..].iter().take_while(|t| t.text != "{").collect();
                let Some(open) = words.get(at + head.len()) else {
                    continue;
                };
                if head.iter().any(|t| t.text == "for") {
                    continue;
                }
                let mut depth = 0;
                let mut name = "";
                for word in &head[1..] {
                    match word.text {
                        "<" => depth += 1,
                        ">" => depth -= 1,
                        text if depth == 0 && name.is_empty() => name = text,
                        _ => {}
                    }
                }
                let is_one_of_several = homes.get(name).is_some_and(|count| *count > 1);
                let place = is_one_of_several.then(|| format!(" of {}", file.display()));
                let name = format!("{name}{}", place.unwrap_or_default());
                owner = Some((name, closing(&code, open.at)));
            }
            let name = words.get(at + 1).map_or("", |t| t.text);
            if word.text != "fn" || !name.starts_with(|c: char| c.is_alphabetic() || c == '_') {
                continue;
            }
            if let Some((owner, _)) = &owner {
                *methods.entry(owner.clone()).or_insert(0) += 1;
            }
            let ends = words[at..].iter().find(|t| matches!(t.text, "{" | ";"));
            let Some(open) = ends.filter(|t| t.text == "{") else {
                continue;
            };
            let lines = code[word.at..closing(&code, open.at)].lines().count();
            if lines > limit {
                let place = format!("{}: {name}", file.display());
                long.push(Long { place, lines });
            }
        }
    }
    long.sort_by_key(|found| std::cmp::Reverse(found.lines));
    (long, methods)
}

/// How many types of each name the files of `src` declare.
fn homes(src: &Path) -> BTreeMap<String, usize> {
    let mut homes = BTreeMap::new();
    for path in rust_files(src) {
        let text = std::fs::read_to_string(&path).expect("the sources can be read");
        let (code, _) = without_tests(&code(&text));
        for pair in tokens(&code).windows(2) {
            if matches!(pair[0].text, "struct" | "enum") {
                *homes.entry(pair[1].text.to_owned()).or_default() += 1;
            }
        }
    }
    homes
}
