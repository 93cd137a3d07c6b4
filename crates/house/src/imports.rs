//! The modules of a crate, and the arrows between them.
//!
//! An arrow leads from a file to each file that it names in a path, in a `use` or elsewhere. A name that a folder's `mod.rs`
//! or `lib.rs` takes from below leads to the file that defines it. Tests are left out.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::files::rust_files;
use crate::source::{Token, code, tokens, without_tests};

/// One file of a crate.
#[derive(Debug, Default)]
struct Module {
    code: String,
    /// It declares modules and takes names from them, and nothing else.
    is_index: bool,
    /// Names that it takes from elsewhere, with their paths from the root of the crate.
    names: BTreeMap<String, Vec<String>>,
}

/// The arrows of a crate, by the paths of its modules: `store::cache`, and an empty one for its root.
#[derive(Debug)]
pub struct Imports {
    /// For each module those that it names.
    pub arrows: BTreeMap<String, BTreeSet<String>>,
}

impl Imports {
    /// Reads the crate whose sources are below `src`.
    ///
    /// # Panics
    /// When a file cannot be read.
    #[must_use]
    pub fn read(src: &Path, own_name: &str) -> Self {
        let mut modules = BTreeMap::new();
        let mut tests = BTreeSet::new();
        for path in rust_files(src) {
            let name = module_name(src, &path);
            let text = std::fs::read_to_string(&path).expect("the sources can be read");
            let (code, test_modules) = without_tests(&code(&text));
            // A test module lies below its file, or below the folder of that.
            let folder = name.rsplit_once("::").map_or("", |(folder, _)| folder);
            for test in test_modules {
                tests.insert(joined(&name, &test));
                tests.insert(joined(folder, &test));
            }
            let is_index = is_index(&code);
            let module = Module {
                code,
                is_index,
                names: BTreeMap::new(),
            };
            modules.insert(name, module);
        }
        modules.retain(|name, _| {
            let is_below = |test: &String| name == test || name.starts_with(&format!("{test}::"));
            !tests.iter().any(is_below)
        });
        let names: BTreeSet<String> = modules.keys().cloned().collect();
        let mut paths = BTreeMap::new();
        for (name, module) in &mut modules {
            let found = paths_of(name, &module.code, &names, own_name);
            for path in &found {
                if let (true, Some(last)) = (path.is_use, path.segments.last()) {
                    module.names.insert(last.clone(), path.segments.clone());
                }
            }
            paths.insert(name.clone(), found);
        }
        let mut arrows = BTreeMap::new();
        for (name, found) in paths {
            let to = found
                .iter()
                .filter_map(|path| definer(&path.segments, &modules, 0));
            let to = to.filter(|to| *to != name && !modules[to].is_index);
            let to: BTreeSet<String> = to.collect();
            if !modules[&name].is_index {
                arrows.insert(name, to);
            }
        }
        Self { arrows }
    }

    /// Groups of files each of which leads to all others of its group.
    #[must_use]
    pub fn circles(&self) -> Vec<BTreeSet<String>> {
        let reach: BTreeMap<&String, BTreeSet<&String>> = self
            .arrows
            .keys()
            .map(|from| (from, self.reach(from)))
            .collect();
        let mut circles: Vec<BTreeSet<String>> = Vec::new();
        for (from, to) in &reach {
            if !to.contains(from) || circles.iter().any(|circle| circle.contains(*from)) {
                continue;
            }
            let circle = to.iter().filter(|other| reach[**other].contains(from));
            circles.push(circle.map(|name| (*name).clone()).collect());
        }
        circles
    }

    fn reach(&self, from: &String) -> BTreeSet<&String> {
        let mut seen = BTreeSet::new();
        let mut next = vec![from];
        while let Some(from) = next.pop() {
            for to in self.arrows.get(from).into_iter().flatten() {
                if seen.insert(to) {
                    next.push(to);
                }
            }
        }
        seen
    }
}

fn joined(parent: &str, child: &str) -> String {
    if parent.is_empty() {
        child.to_owned()
    } else {
        format!("{parent}::{child}")
    }
}

/// The path of a module from the root of its crate.
fn module_name(src: &Path, path: &Path) -> String {
    let path = path.strip_prefix(src).expect("the file lies there");
    let parts = path.with_extension("");
    let mut parts: Vec<_> = parts
        .components()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib")) {
        parts.pop();
    }
    parts.join("::")
}

/// Whether all items are declarations of modules and `use`.
fn is_index(code: &str) -> bool {
    let words = tokens(code);
    words.iter().any(|t| t.text == "mod")
        && !words.iter().any(|t| {
            matches!(
                t.text,
                "fn" | "struct" | "enum" | "impl" | "trait" | "static"
            )
        })
}

struct NamedPath {
    segments: Vec<String>,
    is_use: bool,
}

/// All paths in `code` that lead into the crate, from its root.
fn paths_of(module: &str, code: &str, modules: &BTreeSet<String>, own: &str) -> Vec<NamedPath> {
    let words = tokens(code);
    let mut found = Vec::new();
    let mut at = 0;
    while at < words.len() {
        if words[at].text == "use" {
            let len = words[at..].iter().take_while(|t| t.text != ";").count();
            let mut paths = Vec::new();
            use_tree(&words[at + 1..at + len], &mut Vec::new(), &mut paths);
            let paths = paths
                .iter()
                .filter_map(|path| from_root(module, path, modules, own));
            found.extend(paths.map(|segments| NamedPath {
                segments,
                is_use: true,
            }));
            at += len;
            continue;
        }
        let begins = matches!(words[at].text, "crate" | "super" | "self")
            && words.get(at + 1).is_some_and(|t| t.text == "::");
        if begins {
            let mut path = vec![words[at].text];
            while words.get(at + 1).is_some_and(|t| t.text == "::")
                && words
                    .get(at + 2)
                    .is_some_and(|t| t.text != "<" && t.text != "{")
            {
                path.push(words[at + 2].text);
                at += 2;
            }
            let segments = from_root(module, &path, modules, own);
            found.extend(segments.map(|segments| NamedPath {
                segments,
                is_use: false,
            }));
        }
        at += 1;
    }
    found
}

/// The paths of one `use`, without their names here.
fn use_tree<'a>(words: &[Token<'a>], before: &mut Vec<&'a str>, paths: &mut Vec<Vec<&'a str>>) {
    let depth = before.len();
    let mut at = 0;
    while at < words.len() {
        match words[at].text {
            "::" => at += 1,
            "as" => at += 2,
            "," => {
                finish(before, depth, paths);
                at += 1;
            }
            "{" => {
                let mut level = 0;
                let len = words[at..].iter().position(|t| {
                    level += i32::from(t.text == "{") - i32::from(t.text == "}");
                    level == 0
                });
                let len = len.unwrap_or(words.len() - at);
                use_tree(&words[at + 1..at + len], before, paths);
                before.truncate(depth);
                at += len + 1;
            }
            text => {
                before.push(text);
                at += 1;
            }
        }
    }
    finish(before, depth, paths);
}

fn finish<'a>(before: &mut Vec<&'a str>, depth: usize, paths: &mut Vec<Vec<&'a str>>) {
    if before.len() > depth {
        let mut path = before.clone();
        if path.last() == Some(&"self") {
            path.pop();
        }
        paths.push(path);
        before.truncate(depth);
    }
}

/// `path`, written in `module`, from the root of the crate; `None` for those into others.
fn from_root(
    module: &str,
    path: &[&str],
    modules: &BTreeSet<String>,
    own: &str,
) -> Option<Vec<String>> {
    let here = || module.split("::").filter(|part| !part.is_empty());
    let mut base: Vec<&str> = Vec::new();
    let mut rest = path;
    match path.first().copied()? {
        "crate" => rest = &path[1..],
        name if name == own => rest = &path[1..],
        "self" => {
            base = here().collect();
            rest = &path[1..];
        }
        "super" => {
            base = here().collect();
            while rest.first() == Some(&"super") {
                base.pop();
                rest = &rest[1..];
            }
        }
        first if modules.contains(&joined(module, first)) => base = here().collect(),
        _ => return None,
    }
    base.extend(rest);
    Some(base.into_iter().map(str::to_owned).collect())
}

/// The module that defines the last name of `path`.
fn definer(path: &[String], modules: &BTreeMap<String, Module>, depth: usize) -> Option<String> {
    let mut found = String::new();
    let mut rest = path;
    while let [first, others @ ..] = rest {
        let next = joined(&found, first);
        if !modules.contains_key(&next) {
            break;
        }
        found = next;
        rest = others;
    }
    let module = modules.get(&found)?;
    match rest.first().and_then(|name| module.names.get(name)) {
        Some(from) if depth < 8 && from != path => definer(from, modules, depth + 1),
        _ => Some(found),
    }
}
