//! The loads that the file systems get.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

use crate::command::run_statuses;
use crate::error::{At, Result};

const CHUNK_BYTES: usize = 1 << 20;
/// Entries of a directory in made trees (Tokubench has as many).
const FANOUT: u64 = 128;

/// Writes `bytes` of contents that do not compress, from the beginning, and syncs.
pub(crate) fn write_file(path: &Path, bytes: u64, rng: &mut StdRng) -> Result<()> {
    let mut file = File::create(path).at(path)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    rng.fill_bytes(&mut chunk);
    let mut left = bytes;
    while left > 0 {
        // A new start in each chunk is enough to tell them apart, and costs nothing.
        chunk[..8].copy_from_slice(&rng.next_u64().to_le_bytes());
        let len = left.min(CHUNK_BYTES as u64) as usize;
        file.write_all(&chunk[..len]).at(path)?;
        left -= len as u64;
    }
    file.sync_all().at(path)
}

/// Reads a file from the beginning to its end.
pub(crate) fn read_file(path: &Path) -> Result<()> {
    let mut file = File::open(path).at(path)?;
    let mut chunk = vec![0; CHUNK_BYTES];
    while file.read(&mut chunk).at(path)? > 0 {}
    Ok(())
}

/// Overwrites `count` pieces of `piece` bytes at random multiples of `align`; syncs after each, or
/// once.
pub(crate) fn overwrite(
    path: &Path,
    count: u64,
    piece: usize,
    align: u64,
    sync_each: bool,
    rng: &mut StdRng,
) -> Result<()> {
    let file = File::options().write(true).open(path).at(path)?;
    let places = file.metadata().at(path)?.len() / align;
    let mut bytes = vec![0; piece];
    for _ in 0..count {
        rng.fill_bytes(&mut bytes);
        let offset = rng.random_range(0..places) * align;
        file.write_all_at(&bytes, offset).at(path)?;
        if sync_each {
            file.sync_data().at(path)?;
        }
    }
    file.sync_all().at(path)
}

/// Where the `number`th file of a made tree is: directories of [`FANOUT`] entries, two levels of
/// them.
pub(crate) fn small_file(root: &Path, number: u64) -> PathBuf {
    let dir = number / FANOUT;
    root.join(format!(
        "{:03}/{:03}/{:03}",
        dir / FANOUT,
        dir % FANOUT,
        number % FANOUT
    ))
}

/// Makes `count` files of `bytes` each, by `threads` at the same time, each with directories of its
/// own. Returns how many there were, and the files a second until then, each time that one thread
/// had made a tenth of its own.
pub(crate) fn create_files(
    root: &Path,
    count: u64,
    bytes: usize,
    threads: u64,
    seed: u64,
) -> Result<Vec<(f64, f64)>> {
    const STEPS: u64 = 10;
    let begun = Instant::now();
    let made = AtomicU64::new(0);
    let made = &made;
    let one = |thread: u64| -> Result<Vec<(f64, f64)>> {
        let mut rng = StdRng::seed_from_u64(seed ^ thread << 32);
        let root = root.join(format!("t{thread}"));
        let mut contents = vec![0; bytes];
        let each = count / threads;
        let mut points = Vec::new();
        for number in 0..each {
            let path = small_file(&root, number);
            if number % FANOUT == 0
                && let Some(dir) = path.parent()
            {
                std::fs::create_dir_all(dir).at(dir)?;
            }
            rng.fill_bytes(&mut contents);
            std::fs::write(&path, &contents).at(&path)?;
            let so_far = made.fetch_add(1, Ordering::Relaxed) + 1;
            if thread == 0 && (number + 1) % (each / STEPS).max(1) == 0 {
                points.push((so_far as f64, so_far as f64 / begun.elapsed().as_secs_f64()));
            }
        }
        Ok(points)
    };
    let one = &one;
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || one(thread)))
            .collect();
        let mut points = Vec::new();
        for thread in all {
            match thread.join() {
                Ok(done) => points.extend(done?),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(points)
    })
}

/// The work of a mail server on a directory of messages of 4 KiB (BetrFS 0.2, figure 9). Each
/// message is written, synced and renamed into place; then it is flagged, which is another rename.
/// Every second one is deleted.
pub(crate) fn serve_mail(root: &Path, messages: u64, seed: u64) -> Result<()> {
    let [arriving, new, seen] = ["tmp", "new", "cur"].map(|name| root.join(name));
    for dir in [&arriving, &new, &seen] {
        std::fs::create_dir_all(dir).at(dir)?;
    }
    let sync = |dir: &Path| File::open(dir).and_then(|dir| dir.sync_all()).at(dir);
    let mut rng = StdRng::seed_from_u64(seed);
    let mut contents = vec![0; 4096];
    for number in 0..messages {
        let [written, delivered] = [&arriving, &new].map(|dir| dir.join(number.to_string()));
        rng.fill_bytes(&mut contents);
        let mut file = File::create(&written).at(&written)?;
        file.write_all(&contents).at(&written)?;
        file.sync_all().at(&written)?;
        std::fs::rename(&written, &delivered).at(&written)?;
        sync(&new)?;
        let flagged = seen.join(format!("{number}:2,S"));
        std::fs::rename(&delivered, &flagged).at(&delivered)?;
        if number % 2 == 1 {
            std::fs::remove_file(&flagged).at(&flagged)?;
        }
    }
    sync(&seen)
}

/// `grep -rF`: all bytes of all files are looked at.
pub(crate) fn grep(path: &Path, text: &str) -> Result<()> {
    let args = ["-rcF".as_ref(), text.as_ref(), path.as_os_str()];
    run_statuses("grep", &args, &[0, 1]).map(drop)
}

/// `find -name`.
pub(crate) fn find(path: &Path, name: &str) -> Result<()> {
    let args = [path.as_os_str(), "-name".as_ref(), name.as_ref()];
    run_statuses("find", &args, &[0]).map(drop)
}

/// All files below, directories in the order in which they are read.
pub(crate) fn files(root: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut dirs) = (Vec::new(), VecDeque::from([root.to_path_buf()]));
    while let Some(dir) = dirs.pop_front() {
        for entry in std::fs::read_dir(&dir).at(&dir)? {
            let entry = entry.at(&dir)?;
            let kind = entry.file_type().at(entry.path())?;
            if kind.is_dir() {
                dirs.push_back(entry.path());
            } else if kind.is_file() {
                found.push(entry.path());
            }
        }
    }
    Ok(found)
}

/// Walks the tree, opens and reads every file, as the walk meets it; returns how many there were.
pub(crate) fn walk_and_read(root: &Path) -> Result<u64> {
    let (mut count, mut dirs) = (0, VecDeque::from([root.to_path_buf()]));
    let mut contents = Vec::new();
    while let Some(dir) = dirs.pop_front() {
        for entry in std::fs::read_dir(&dir).at(&dir)? {
            let entry = entry.at(&dir)?;
            let path = entry.path();
            if entry.file_type().at(&path)?.is_dir() {
                dirs.push_back(path);
                continue;
            }
            contents.clear();
            let mut file = File::open(&path).at(&path)?;
            file.read_to_end(&mut contents).at(&path)?;
            count += 1;
        }
    }
    Ok(count)
}

/// Copies the first `limit` files of a tree, in the order of their names, with their directories;
/// returns files and bytes.
pub(crate) fn copy_some(source: &Path, copy: &Path, limit: u64) -> Result<(u64, u64)> {
    let (mut count, mut bytes) = (0, 0);
    let mut dirs = vec![PathBuf::new()];
    while let Some(dir) = dirs.pop() {
        let (from, to) = (source.join(&dir), copy.join(&dir));
        if !dir.as_os_str().is_empty() {
            std::fs::create_dir(&to).at(&to)?;
        }
        let mut entries: Vec<_> = std::fs::read_dir(&from)
            .at(&from)?
            .collect::<std::io::Result<_>>()
            .at(&from)?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        let mut below = Vec::new();
        for entry in entries {
            let kind = entry.file_type().at(entry.path())?;
            if kind.is_dir() {
                below.push(dir.join(entry.file_name()));
            } else if kind.is_file() {
                let to = to.join(entry.file_name());
                bytes += std::fs::copy(entry.path(), &to).at(&to)?;
                count += 1;
                if count == limit {
                    return Ok((count, bytes));
                }
            }
        }
        dirs.extend(below.into_iter().rev());
    }
    Ok((count, bytes))
}
