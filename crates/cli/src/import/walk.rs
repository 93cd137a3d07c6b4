//! A directory tree, read by several threads and handed on in the order of its names.
//!
//! ```text
//! walker    lists directories and goes down at each, names sorted: jobs of some objects
//! readers   read the objects of a job into frames
//! caller    takes the frames, job by job
//! ```
//!
//! Objects with several names come to the caller unread: only there is it known which name comes
//! first.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use ramet_fs::{IMPORT_PATH_BYTES_MAX, ImportItem};
use rustix::fs::{AtFlags, Dir, FileType, OFlags, statat};
use rustix::io::Errno;

use crate::failure::Outcome;
use crate::import::read::{Frames, Leaf, Opened, Reader, Seen, open_quietly};
use crate::import::report::Report;

/// Objects of a job.
const JOB_LEN: usize = 32;
/// Jobs between the walker and the caller.
const JOBS_MAX: usize = 8;
/// Frames of a job that wait for the caller.
const FRAMES_MAX: usize = 2;
const READERS_MAX: usize = 8;

/// A part of the result of a job.
enum Step {
    Frame(Vec<u8>),
    /// An object with several names, which is not read yet.
    Shared(Box<Opened>),
}

struct Job {
    seen: Vec<Seen>,
    out: SyncSender<Step>,
}

/// Hands the tree below `top` to `deliver`, frame by frame.
///
/// # Errors
/// Those of `deliver`. Objects that cannot be read are told in the report and left out.
pub fn walk(
    top: OwnedFd,
    makes_devices: bool,
    report: &Report,
    deliver: &mut dyn FnMut(Vec<u8>) -> Outcome,
) -> Outcome {
    let (jobs, taken) = sync_channel::<Job>(JOBS_MAX);
    let (order, results) = sync_channel::<Receiver<Step>>(JOBS_MAX);
    let taken = Mutex::new(taken);
    let cpus = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cpus.clamp(2, READERS_MAX) {
            scope.spawn(|| serve(&taken, Reader::new(report, makes_devices)));
        }
        scope.spawn(move || {
            let mut walker = Walker {
                jobs,
                order,
                waiting: Vec::new(),
                report,
                path: Vec::new(),
            };
            // The caller is gone when a job cannot be handed over; it has the error.
            let _ = walker.run(top);
        });
        collect(results, Reader::new(report, makes_devices), deliver)
    })
}

/// Reads jobs until there are no more.
fn serve(jobs: &Mutex<Receiver<Job>>, mut reader: Reader<'_>) {
    loop {
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else {
            return;
        };
        read_job(job, &mut reader);
    }
}

fn read_job(job: Job, reader: &mut Reader<'_>) {
    let out = job.out;
    let mut send = |frame| out.send(Step::Frame(frame)).is_ok();
    let mut frames = Frames::new(&mut send);
    for seen in job.seen {
        match seen {
            Seen::Directory { dir, path } => reader.directory(&dir, &path, &mut frames),
            Seen::Leaf(leaf) => match Opened::new(leaf) {
                Err((leaf, error)) => reader.tell_error(&leaf.path, error),
                Ok(opened) if opened.identity().is_some() => {
                    frames.flush();
                    if out.send(Step::Shared(Box::new(opened))).is_err() {
                        return;
                    }
                }
                Ok(opened) => {
                    reader.object(&opened, false, &mut frames);
                }
            },
        }
        if frames.is_cut() {
            return;
        }
    }
    frames.flush();
}

/// Takes the results of all jobs in their order.
fn collect(
    results: Receiver<Receiver<Step>>,
    mut reader: Reader<'_>,
    deliver: &mut dyn FnMut(Vec<u8>) -> Outcome,
) -> Outcome {
    let mut firsts: HashMap<(u64, u64), Vec<u8>> = HashMap::new();
    for job in results {
        for step in job {
            let opened = match step {
                Step::Frame(frame) => {
                    deliver(frame)?;
                    continue;
                }
                Step::Shared(opened) => opened,
            };
            let mut delivered = Ok(());
            let mut out = |frame| {
                delivered = deliver(frame);
                delivered.is_ok()
            };
            let mut frames = Frames::new(&mut out);
            let path = opened.path();
            match opened.identity().and_then(|identity| firsts.get(&identity)) {
                Some(first) => {
                    frames.put(&ImportItem::Link { path, first }, path.len() + first.len());
                }
                None => {
                    // Of an object that is left out, each name is told.
                    if reader.object(&opened, true, &mut frames) {
                        firsts.extend(opened.identity().map(|identity| (identity, path.to_vec())));
                    }
                }
            }
            frames.flush();
            delivered?;
        }
    }
    Ok(())
}

/// The caller takes no more jobs.
struct Cut;

/// A directory whose entries are not all handed over. Its path is that of the walker as long as it
/// is the innermost one.
struct Level {
    dir: Arc<OwnedFd>,
    /// Length of the path of the directory around it.
    above: usize,
    names: std::vec::IntoIter<(Vec<u8>, FileType)>,
}

struct Walker<'a> {
    jobs: SyncSender<Job>,
    order: SyncSender<Receiver<Step>>,
    waiting: Vec<Seen>,
    report: &'a Report,
    /// The path of the innermost directory.
    path: Vec<u8>,
}

impl Walker<'_> {
    fn run(&mut self, top: OwnedFd) -> Result<(), Cut> {
        let mut levels = Vec::new();
        levels.extend(self.enter(Arc::new(top), Vec::new())?);
        while let Some(level) = levels.last_mut() {
            let Some((name, kind)) = level.names.next() else {
                self.path.truncate(level.above);
                levels.pop();
                continue;
            };
            let mut path = self.path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            let dir = Arc::clone(&level.dir);
            if kind == FileType::Directory && path.len() > IMPORT_PATH_BYTES_MAX {
                self.report.tell_error(&path, Errno::NAMETOOLONG);
                continue;
            }
            if kind == FileType::Directory {
                match open_quietly(&dir, &name, OFlags::DIRECTORY) {
                    Ok(inner) => levels.extend(self.enter(Arc::new(inner), path)?),
                    Err(error) => self.report.tell_error(&path, error),
                }
                continue;
            }
            self.hand_over(Seen::Leaf(Leaf {
                dir,
                name,
                path,
                kind,
            }))?;
        }
        self.flush()
    }

    /// Hands a directory over. Answers its entries, if they can be read.
    fn enter(&mut self, dir: Arc<OwnedFd>, path: Vec<u8>) -> Result<Option<Level>, Cut> {
        self.hand_over(Seen::Directory {
            dir: Arc::clone(&dir),
            path: path.clone(),
        })?;
        match names_in(&dir) {
            Ok(names) => {
                let above = std::mem::replace(&mut self.path, path).len();
                Ok(Some(Level {
                    dir,
                    above,
                    names: names.into_iter(),
                }))
            }
            Err(error) => {
                self.report.tell_error(&path, error);
                Ok(None)
            }
        }
    }

    fn hand_over(&mut self, seen: Seen) -> Result<(), Cut> {
        self.waiting.push(seen);
        if self.waiting.len() >= JOB_LEN {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Cut> {
        let (out, result) = sync_channel(FRAMES_MAX);
        let seen = std::mem::take(&mut self.waiting);
        self.jobs.send(Job { seen, out }).map_err(|_| Cut)?;
        self.order.send(result).map_err(|_| Cut)
    }
}

/// Names and kinds of the entries of a directory, sorted.
fn names_in(dir: &OwnedFd) -> rustix::io::Result<Vec<(Vec<u8>, FileType)>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(error),
            },
            kind => kind,
        };
        names.push((name.to_vec(), kind));
    }
    names.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    Ok(names)
}
