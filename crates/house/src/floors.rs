//! Floors: each folder of a crate lies on one, and its files import from their own folder and from lower floors only.
//!
//! `floors.txt` declares them.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::files::workspace;
use crate::imports::Imports;

/// The declared floors of one crate.
#[derive(Debug, Default)]
pub struct Floors {
    /// The floor of each folder or file at the root, from 0.
    pub of: BTreeMap<String, usize>,
    /// Folders and files by floor, the lowest first.
    pub rows: Vec<Vec<String>>,
}

/// Crates from the lowest on, with their floors.
#[derive(Debug)]
pub struct Plan {
    /// Each crate with its floors.
    pub crates: Vec<(String, Floors)>,
}

/// All that is wrong with one crate.
#[derive(Debug)]
pub struct Verdict {
    /// The crate.
    pub name: String,
    /// Number of files.
    pub files: usize,
    /// Number of arrows between files.
    pub arrows: usize,
    /// Files in circles, each circle by itself.
    pub circles: Vec<Vec<String>>,
    /// Arrows that lead up, or into another folder of the same floor.
    pub upward: Vec<(String, String)>,
    /// Files and folders without a floor.
    pub homeless: Vec<String>,
}

impl Plan {
    /// The plan of this workspace.
    ///
    /// # Panics
    /// When the text is no plan.
    #[must_use]
    pub fn of_workspace() -> Self {
        Self::parse(include_str!("../floors.txt"))
    }

    fn parse(text: &str) -> Self {
        let mut crates: Vec<(String, Floors)> = Vec::new();
        for line in text.lines() {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<_> = line.split_whitespace().collect();
            let here = crates.last_mut().map(|(_, floors)| floors);
            match (&words[..], here) {
                ([], _) => {}
                (["crate", name], _) => crates.push(((*name).to_owned(), Floors::default())),
                (names, Some(floors)) => {
                    let names: Vec<_> = names.iter().map(|&name| name.to_owned()).collect();
                    let floor = floors.rows.len();
                    floors
                        .of
                        .extend(names.iter().map(|name| (name.clone(), floor)));
                    floors.rows.push(names);
                }
                (_, None) => panic!("a floor of no crate: {line}"),
            }
        }
        Self { crates }
    }
}

/// The folder, or the file at the root, that a module belongs to.
fn folder(module: &str) -> &str {
    module.split("::").next().unwrap_or(module)
}

/// Whether a module is the root of a library or of a program, which lies above all floors.
fn is_root(module: &str) -> bool {
    module.is_empty() || module == "main"
}

/// Compares a crate with its floors.
#[must_use]
pub fn judge(name: &str, floors: &Floors) -> Verdict {
    let src = workspace().join("crates").join(name).join("src");
    let imports = Imports::read(&src, &format!("ramet_{name}"));
    let circles = imports.circles();
    let circles = circles
        .into_iter()
        .map(|circle| circle.into_iter().collect());
    let mut upward = Vec::new();
    let mut homeless = Vec::new();
    // Without floors a crate is its circles.
    let has_floors = !floors.rows.is_empty();
    for (from, to) in &imports.arrows {
        let here = floors.of.get(folder(from));
        if has_floors && here.is_none() && !is_root(from) {
            homeless.push(from.clone());
        }
        for to in to {
            let there = floors.of.get(folder(to));
            let rises = match (here, there) {
                _ if is_root(to) => true,
                _ if folder(from) == folder(to) => false,
                (Some(here), Some(there)) => there >= here,
                _ => false,
            };
            if rises {
                upward.push((from.clone(), to.clone()));
            }
        }
    }
    Verdict {
        name: name.to_owned(),
        files: imports.arrows.len(),
        arrows: imports.arrows.values().map(|to| to.len()).sum(),
        circles: circles.collect(),
        upward,
        homeless,
    }
}

impl Verdict {
    /// Files that lie in a circle.
    #[must_use]
    pub fn in_circles(&self) -> usize {
        self.circles.iter().map(Vec::len).sum()
    }

    /// All that is wrong, a line each.
    #[must_use]
    pub fn details(&self) -> String {
        let mut text = String::new();
        for circle in &self.circles {
            let _ = writeln!(text, "  circle: {}", circle.join(" "));
        }
        for (from, to) in &self.upward {
            let _ = writeln!(text, "  upward: {from} -> {to}");
        }
        for name in &self.homeless {
            let _ = writeln!(text, "  without a floor: {name}");
        }
        text
    }
}

/// The table of floors for `docs/architecture.md`.
#[must_use]
pub fn table(plan: &Plan) -> String {
    let mut text = String::from(
        "| crate | floors, the lowest first; a file imports from its own folder and from the left |\n\
         | --- | --- |\n",
    );
    for (name, floors) in &plan.crates {
        let rows = floors.rows.iter().map(|row| row.join(" "));
        let rows: Vec<_> = rows.collect();
        let _ = writeln!(text, "| {name} | {} |", rows.join(" < "));
    }
    text
}

/// Dependencies of crates on crates that do not lie below them in the plan, as `from -> to`. Those for tests are left out.
///
/// # Panics
/// When a manifest cannot be read.
#[must_use]
pub fn crates_upward(plan: &Plan) -> Vec<String> {
    let names: Vec<_> = plan.crates.iter().map(|(name, _)| name.as_str()).collect();
    let mut found = Vec::new();
    for (at, name) in names.iter().enumerate() {
        let path = workspace().join("crates").join(name).join("Cargo.toml");
        let manifest = std::fs::read_to_string(path).expect("the manifest can be read");
        let mut is_for_all = false;
        for line in manifest.lines() {
            if line.starts_with('[') {
                is_for_all = line == "[dependencies]";
            }
            let Some(line) = line.strip_prefix("ramet-").filter(|_| is_for_all) else {
                continue;
            };
            let other = line.split(['.', ' ', '=']).next().unwrap_or(line);
            if !names[..at].contains(&other) {
                found.push(format!("{name} -> {other}"));
            }
        }
    }
    found
}
