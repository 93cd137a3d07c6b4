//! Where the sources lie.

use std::path::{Path, PathBuf};

/// The folder of the workspace.
#[must_use]
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All Rust sources below `folder`, sorted by path.
///
/// # Panics
/// When a folder or file cannot be read.
#[must_use]
pub fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(&folder).expect("the sources can be read");
        for entry in entries {
            let path = entry.expect("the sources can be read").path();
            if path.is_dir() && path.file_name().is_none_or(|name| name != "target") {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// The names of the crates, sorted.
///
/// # Panics
/// When the workspace cannot be read.
#[must_use]
pub fn crates() -> Vec<String> {
    let entries = std::fs::read_dir(workspace().join("crates")).expect("the sources can be read");
    let names = entries.map(|entry| {
        let name = entry.expect("the sources can be read").file_name();
        name.into_string().expect("crates have plain names")
    });
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}
