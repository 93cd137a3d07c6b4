//! Crash checking: the trees that may be found after the daemon was killed.
//!
//! Each writer changes a tree of its own and remembers every change it issued, in order. The
//! promise under test: after a crash the volume is a prefix of history, no
//! older than the last acknowledged sync. So for each writer some number of its changes, at least
//! those that completed before an acknowledged fsync of *any* writer began, must give exactly the
//! tree found; nothing may be there twice, in part, or out of order. One write(2) reaches the
//! daemon in pieces that end at page boundaries, so a write is remembered as its pieces.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rand::Rng;
use rand::rngs::StdRng;

use crate::tree::pick;

/// Pieces of an unaligned write end at multiples of this.
const PAGE_BYTES: u64 = 4096;

/// A file's bytes, or `None` for a directory.
type Node = Option<Vec<u8>>;

/// A tree in memory, by paths relative to the writer's folder (which itself is the empty path).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State(BTreeMap<PathBuf, Node>);

/// One change that is applied whole or not at all.
#[derive(Clone, Debug)]
enum Step {
    Create(PathBuf),
    Mkdir(PathBuf),
    Write(PathBuf, u64, Vec<u8>),
    Truncate(PathBuf, u64),
    Rename(PathBuf, PathBuf),
    Unlink(PathBuf),
    Clone(PathBuf, PathBuf),
    RemoveTree(PathBuf),
}

impl State {
    /// Reads the tree at `root`.
    pub fn read(root: &Path) -> io::Result<State> {
        let mut out = BTreeMap::from([(PathBuf::new(), None)]);
        let mut pending = vec![PathBuf::new()];
        while let Some(dir) = pending.pop() {
            for entry in fs::read_dir(root.join(&dir))? {
                let entry = entry?;
                let rel = dir.join(entry.file_name());
                if entry.file_type()?.is_dir() {
                    pending.push(rel.clone());
                    out.insert(rel, None);
                } else {
                    let bytes = fs::read(entry.path())?;
                    out.insert(rel, Some(bytes));
                }
            }
        }
        Ok(State(out))
    }

    fn below(&self, path: &Path) -> Vec<PathBuf> {
        self.0
            .keys()
            .filter(|p| p.starts_with(path))
            .cloned()
            .collect()
    }

    /// Makes one change; returns the names it touched.
    fn apply(&mut self, step: &Step) -> Vec<PathBuf> {
        match step {
            Step::Create(path) => {
                self.0.insert(path.clone(), Some(Vec::new()));
                vec![path.clone()]
            }
            Step::Mkdir(path) => {
                self.0.insert(path.clone(), None);
                vec![path.clone()]
            }
            Step::Write(path, offset, bytes) => {
                if let Some(Some(file)) = self.0.get_mut(path) {
                    let end = *offset as usize + bytes.len();
                    if file.len() < end {
                        file.resize(end, 0);
                    }
                    file[*offset as usize..end].copy_from_slice(bytes);
                }
                vec![path.clone()]
            }
            Step::Truncate(path, len) => {
                if let Some(Some(file)) = self.0.get_mut(path) {
                    file.resize(*len as usize, 0);
                }
                vec![path.clone()]
            }
            Step::Rename(from, to) => {
                let mut touched = self.remove(to);
                for path in self.below(from) {
                    let rest = path.strip_prefix(from).expect("it is below").to_path_buf();
                    let node = self.0.remove(&path).expect("just listed");
                    let new = join(to, &rest);
                    self.0.insert(new.clone(), node);
                    touched.extend([path, new]);
                }
                touched
            }
            Step::Unlink(path) | Step::RemoveTree(path) => self.remove(path),
            Step::Clone(from, to) => {
                // Collected first: the copy is of the state before, also into its own subtree.
                let copied: Vec<_> = self
                    .below(from)
                    .into_iter()
                    .map(|path| (path.clone(), self.0[&path].clone()))
                    .collect();
                let mut touched = self.remove(to);
                for (path, node) in copied {
                    let rest = path.strip_prefix(from).expect("it is below").to_path_buf();
                    let new = join(to, &rest);
                    self.0.insert(new.clone(), node);
                    touched.push(new);
                }
                touched
            }
        }
    }

    fn remove(&mut self, path: &Path) -> Vec<PathBuf> {
        let gone = self.below(path);
        for name in &gone {
            self.0.remove(name);
        }
        gone
    }

    /// The names below which two trees differ.
    fn differing(&self, other: &State) -> BTreeSet<PathBuf> {
        let names = self.0.keys().chain(other.0.keys());
        names
            .filter(|name| self.0.get(*name) != other.0.get(*name))
            .cloned()
            .collect()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.names(|node| node.is_some())
    }

    fn dirs(&self) -> Vec<PathBuf> {
        self.names(Option::is_none)
    }

    fn names(&self, keep: impl Fn(&Node) -> bool) -> Vec<PathBuf> {
        self.0
            .iter()
            .filter(|(_, node)| keep(node))
            .map(|(path, _)| path.clone())
            .collect()
    }

    fn bytes(&self) -> usize {
        self.0.values().flatten().map(Vec::len).sum()
    }

    /// The first names in which two trees differ, in words.
    fn describe_difference(&self, other: &State) -> String {
        let words = |node: Option<&Node>| match node {
            None => "absent".to_string(),
            Some(None) => "a directory".to_string(),
            Some(Some(bytes)) => format!("{} bytes", bytes.len()),
        };
        self.differing(other)
            .iter()
            .take(5)
            .map(|name| {
                let at = match (self.0.get(name), other.0.get(name)) {
                    (Some(Some(a)), Some(Some(b))) => {
                        format!(
                            ", first at byte {:?}",
                            a.iter().zip(b).position(|(x, y)| x != y)
                        )
                    }
                    _ => String::new(),
                };
                format!(
                    "{name:?}: {} found, {} expected{at}",
                    words(self.0.get(name)),
                    words(other.0.get(name))
                )
            })
            .collect::<Vec<_>>()
            .join("; ")
    }
}

fn join(base: &Path, rest: &Path) -> PathBuf {
    if rest.as_os_str().is_empty() {
        base.to_path_buf()
    } else {
        base.join(rest)
    }
}

/// Progress of all writers of one mount: the steps that an acknowledged sync makes durable.
#[derive(Debug, Default)]
pub struct Progress {
    /// By writer: steps known to be applied.
    completed: Vec<AtomicU64>,
    /// By writer: steps known to be durable.
    durable: Vec<AtomicU64>,
}

impl Progress {
    /// For `writers` writers that have done nothing yet.
    pub fn new(writers: usize) -> Progress {
        let zeros = || (0..writers).map(|_| AtomicU64::new(0)).collect();
        Progress {
            completed: zeros(),
            durable: zeros(),
        }
    }

    /// Runs a sync; when it succeeds, everything that was completed before it began is durable.
    pub fn sync(&self, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let before: Vec<u64> = self
            .completed
            .iter()
            .map(|c| c.load(Ordering::SeqCst))
            .collect();
        sync()?;
        for (durable, steps) in self.durable.iter().zip(before) {
            durable.fetch_max(steps, Ordering::SeqCst);
        }
        Ok(())
    }
}

/// How a writer clones and removes whole trees: by the command, so that it runs unchanged against
/// any build.
pub trait Structural {
    /// Clones `src` to `dst`, replacing it.
    fn clone_path(&self, src: &Path, dst: &Path) -> io::Result<()>;
    /// Removes `path` whole.
    fn remove_tree(&self, path: &Path) -> io::Result<()>;
}

/// One writer: a folder, the tree it held at the start, and the steps issued since.
pub struct Writer {
    index: usize,
    root: PathBuf,
    start: State,
    now: State,
    steps: Vec<Step>,
    made: u64,
}

impl Writer {
    /// A writer that goes on from the tree at `root` (made when absent).
    pub fn new(index: usize, root: PathBuf) -> io::Result<Writer> {
        fs::create_dir_all(&root)?;
        let start = State::read(&root)?;
        Ok(Writer {
            index,
            root,
            now: start.clone(),
            start,
            steps: Vec::new(),
            made: 0,
        })
    }

    /// Steps issued so far.
    pub fn issued(&self) -> usize {
        self.steps.len()
    }

    /// Changes the tree until a call fails (the daemon died) and returns that error. `stop` ends
    /// it early without one.
    pub fn work(
        &mut self,
        rng: &mut StdRng,
        progress: &Progress,
        structural: &dyn Structural,
        stop: &dyn Fn() -> bool,
    ) -> io::Result<()> {
        while !stop() {
            self.change(rng, structural)
                .map_err(|e| io::Error::new(e.kind(), format!("{e} in {:?}", self.steps.last())))?;
            progress.completed[self.index].store(self.steps.len() as u64, Ordering::SeqCst);
            if rng.random_bool(0.1) {
                let files = self.now.files();
                let path = if files.is_empty() || rng.random_bool(0.3) {
                    self.root.clone()
                } else {
                    self.root.join(pick(&files, rng))
                };
                progress.sync(|| File::open(path)?.sync_all())?;
            }
        }
        Ok(())
    }

    fn change(&mut self, rng: &mut StdRng, structural: &dyn Structural) -> io::Result<()> {
        let (files, dirs) = (self.now.files(), self.now.dirs());
        let too_much = self.now.bytes() > 4 << 20 || files.len() > 300;
        if too_much && dirs.len() > 1 {
            let path = dirs[rng.random_range(1..dirs.len())].clone();
            self.issue(Step::RemoveTree(path.clone()));
            return structural.remove_tree(&self.root.join(path));
        }
        if files.is_empty() || too_much || rng.random_bool(0.15) {
            if too_much {
                let path = pick(&files, rng).clone();
                return self.unlink(path);
            }
            let path = self.fresh(&dirs, rng);
            self.issue(Step::Create(path.clone()));
            return File::create_new(self.root.join(path)).map(drop);
        }
        let file = pick(&files, rng).clone();
        let dir = dirs[rng.random_range(0..dirs.len())].clone();
        match rng.random_range(0..100) {
            0..70 => self.write(file, rng),
            70..76 => {
                let len = rng.random_range(0..30_000);
                self.issue(Step::Truncate(file.clone(), len));
                OpenOptions::new()
                    .write(true)
                    .open(self.root.join(file))?
                    .set_len(len)
            }
            76..81 => {
                let path = self.fresh(&dirs, rng);
                self.issue(Step::Mkdir(path.clone()));
                fs::create_dir(self.root.join(path))
            }
            81..86 => {
                let to = if rng.random_bool(0.5) {
                    pick(&files, rng).clone()
                } else {
                    self.fresh(&dirs, rng)
                };
                if to == file {
                    return Ok(());
                }
                self.rename(file, to)
            }
            86..90 => {
                let to = self.fresh(&dirs, rng);
                if dir.as_os_str().is_empty() || to.starts_with(&dir) {
                    return Ok(());
                }
                self.rename(dir, to)
            }
            90..93 => self.unlink(file),
            _ => {
                let from = if rng.random_bool(0.7) { dir } else { file };
                let to = self.fresh(&dirs, rng);
                self.issue(Step::Clone(from.clone(), to.clone()));
                structural.clone_path(&self.root.join(from), &self.root.join(to))
            }
        }
    }

    /// A name that no step has used yet, in one of `dirs`.
    fn fresh(&mut self, dirs: &[PathBuf], rng: &mut StdRng) -> PathBuf {
        self.made += 1;
        pick(dirs, rng).join(format!("{}-{:x}", self.made, rng.random::<u16>()))
    }

    fn write(&mut self, file: PathBuf, rng: &mut StdRng) -> io::Result<()> {
        let len = self.now.0[&file].as_ref().map_or(0, Vec::len) as u64;
        let offset = if rng.random_bool(0.6) {
            len
        } else {
            rng.random_range(0..=len)
        };
        let mut bytes = vec![0u8; *pick(&[16, 700, 5000, 40_000], rng)];
        rng.fill(&mut bytes[..]);
        self.write_steps(&file, offset, &bytes);
        OpenOptions::new()
            .write(true)
            .open(self.root.join(file))?
            .write_all_at(&bytes, offset)
    }

    fn rename(&mut self, from: PathBuf, to: PathBuf) -> io::Result<()> {
        self.issue(Step::Rename(from.clone(), to.clone()));
        fs::rename(self.root.join(from), self.root.join(to))
    }

    fn unlink(&mut self, path: PathBuf) -> io::Result<()> {
        self.issue(Step::Unlink(path.clone()));
        fs::remove_file(self.root.join(path))
    }

    fn write_steps(&mut self, path: &Path, offset: u64, bytes: &[u8]) {
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let room = PAGE_BYTES - at % PAGE_BYTES;
            let (piece, tail) = rest.split_at(rest.len().min(room as usize));
            self.issue(Step::Write(path.to_path_buf(), at, piece.to_vec()));
            at += piece.len() as u64;
            rest = tail;
        }
    }

    /// Notes a step that is about to be made.
    fn issue(&mut self, step: Step) {
        self.now.apply(&step);
        self.steps.push(step);
    }

    /// Compares the tree found after the crash with the history: it must be the start plus some
    /// number of steps, at least the durable ones. Returns (durable, found, issued).
    ///
    /// # Errors
    /// The difference, in words.
    pub fn check(&self, progress: &Progress) -> Result<(u64, u64, u64), String> {
        let found = State::read(&self.root).map_err(|e| format!("{}: {e}", self.root.display()))?;
        let durable = progress.durable[self.index].load(Ordering::SeqCst);
        let issued = self.steps.len() as u64;
        let mut state = self.start.clone();
        let mut different = state.differing(&found);
        let mut too_old = None;
        let mut at_durable = String::new();
        for number in 0..=issued {
            if number == durable {
                at_durable = found.describe_difference(&state);
            }
            // A tree can repeat (a write of nothing new): a match that is new enough counts.
            if different.is_empty() {
                if number >= durable {
                    return Ok((durable, number, issued));
                }
                too_old = Some(number);
            }
            let Some(step) = self.steps.get(number as usize) else {
                break;
            };
            for name in state.apply(step) {
                if state.0.get(&name) == found.0.get(&name) {
                    different.remove(&name);
                } else {
                    different.insert(name);
                }
            }
        }
        let place = self.root.display();
        Err(match too_old {
            Some(number) => format!(
                "{place}: the tree is that after step {number}, but step {durable} was \
                 acknowledged durable: {at_durable}"
            ),
            None => format!(
                "{place}: the tree is at no point of its history ({issued} steps, {durable} \
                 acknowledged); against the acknowledged one: {at_durable}; against the last \
                 one: {}",
                found.describe_difference(&self.now)
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use std::cell::Cell;

    struct Copies;
    impl Structural for Copies {
        fn clone_path(&self, src: &Path, dst: &Path) -> io::Result<()> {
            // `cp` refuses to copy into its own subtree: by way of a third place.
            let dir = tempfile::tempdir()?;
            let way = dir.path().join("copy");
            for (from, to) in [(src, way.as_path()), (way.as_path(), dst)] {
                let args = [Path::new("-aT"), from, to];
                crate::run_ok("cp", &args);
            }
            Ok(())
        }
        fn remove_tree(&self, path: &Path) -> io::Result<()> {
            fs::remove_dir_all(path)
        }
    }

    fn worked(steps: usize) -> (tempfile::TempDir, Writer, Progress) {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::new(0, dir.path().join("w")).unwrap();
        let progress = Progress::new(1);
        let left = Cell::new(steps);
        let stop = || {
            left.set(left.get().saturating_sub(1));
            left.get() == 0
        };
        writer
            .work(&mut StdRng::seed_from_u64(3), &progress, &Copies, &stop)
            .unwrap();
        (dir, writer, progress)
    }

    #[test]
    fn a_file_system_that_loses_nothing_passes() {
        let (_dir, writer, progress) = worked(400);
        let (durable, found, issued) = writer.check(&progress).unwrap();
        assert!(durable > 0);
        assert_eq!(found, issued);
    }

    #[test]
    fn a_lost_acknowledged_step_is_found() {
        let (_dir, mut writer, progress) = worked(100);
        progress.sync(|| Ok(())).unwrap();
        // As if one more step had been acknowledged that never reached the disk.
        writer.steps.push(Step::Mkdir("lost".into()));
        progress.durable[0].store(writer.steps.len() as u64, Ordering::SeqCst);
        assert!(
            writer
                .check(&progress)
                .unwrap_err()
                .contains("acknowledged durable")
        );
    }

    #[test]
    fn a_state_out_of_order_is_found() {
        let (dir, writer, progress) = worked(100);
        fs::write(dir.path().join("w/stray"), "x").unwrap();
        assert!(
            writer
                .check(&progress)
                .unwrap_err()
                .contains("no point of its history")
        );
    }
}
