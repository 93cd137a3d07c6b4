//! `ramet import`: a directory or a tar archive becomes a tree of a volume, at once and as a whole.
//!
//! Several threads read the source into frames (`import/walk.rs`), which go to the daemon as writes
//! to a file without a name, or straight to a volume that is not mounted (`import/sink.rs`). The
//! tree has no name before all of it is there.

pub mod archive;
mod made;
mod pax;
pub mod read;
pub mod report;
pub mod rights;
pub mod sink;
mod sparse;
mod tally;
mod unpack;
pub mod walk;

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ramet_fs::ImportCounts;
use rustix::fs::{CWD, Mode, OFlags, openat};
use serde_json::json;

use crate::args::Import;
use crate::failure::{Failure, Outcome, status};
use crate::home::refuse_before_init;
use crate::import::report::Report;
use crate::import::rights::Rights;
use crate::import::sink::{Durable, Sink};
use crate::import::tally::Tally;
use crate::import::unpack::{Unpacked, unpacked};
use crate::output::{complain, say};
use crate::progress::Progress;
use crate::size::Size;

/// The source of an import.
pub enum Source {
    Directory(OwnedFd),
    Archive(Box<dyn Read>),
}

impl Source {
    /// The source that an argument of `ramet import` names: the name `-` stands for standard input.
    fn of_argument(path: &Path) -> Outcome<Source> {
        if path == Path::new("-") {
            return Source::archive(path, std::io::stdin().lock());
        }
        let failed = |e| Failure::system(path, e);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = openat(CWD, path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        let file = File::from(opened);
        let kind = file.metadata().map_err(failed)?;
        if kind.is_dir() {
            return Ok(Source::Directory(file.into()));
        }
        Source::archive(path, file)
    }

    fn archive(path: &Path, bytes: impl Read + 'static) -> Outcome<Source> {
        match unpacked(bytes).map_err(|e| Failure::system(path, e))? {
            Unpacked::Archive(archive) => Ok(Source::Archive(archive)),
            Unpacked::Other(program) => {
                let why = format!("compressed: '{program} -dc FILE | ramet import - DST' reads it");
                Err(Failure::at(path, why))
            }
        }
    }
}

pub fn run(args: &Import) -> Outcome<u8> {
    let begun = Instant::now();
    let imported = import(args, Source::of_argument(&args.src)?, Durable::AtOnce)?;
    tell(&imported, begun, args)?;
    Ok(if imported.told > 0 { status::FAILED } else { 0 })
}

/// A tree that came in.
pub struct Imported {
    path: PathBuf,
    counts: ImportCounts,
    /// Objects that were left out or are doubtful; the user was told of each.
    pub told: u64,
}

impl Imported {
    /// Tells how many extended attributes the tree at `path` lacks.
    pub fn tell_refused(&self, path: &Path) {
        let count = self.counts.refused_xattrs;
        if count > 0 {
            complain(format_args!(
                "{}: {count} extended attributes were left out",
                path.display()
            ));
        }
    }
}

/// Imports a tree, and tells the user of nothing but doubtful objects. Messages name the source as
/// `args` do.
pub fn import(args: &Import, source: Source, durable: Durable) -> Outcome<Imported> {
    allow_open_files();
    let rights = Rights::of_process();
    refuse_before_init(&args.dst)?;
    let mut sink = Sink::open(args, rights)?;
    let report = Report::new(&args.src);
    let mut tally = Tally::new(args.verify.then(|| rights.gives_all()));
    let filled = fill(source, rights, &report, &mut sink, &mut tally);
    let published = filled.and_then(|()| sink.publish(durable));
    let verified = published.and_then(|counts| {
        if args.verify {
            verify(&sink, rights, &tally)?;
        }
        Ok(counts)
    });
    let path = sink.path.clone();
    let closed = sink.close();
    let counts = verified?;
    closed?;
    Ok(Imported {
        path,
        counts,
        told: report.told(),
    })
}

/// Hands all of the source over.
fn fill(
    source: Source,
    rights: Rights,
    report: &Report,
    sink: &mut Sink,
    tally: &mut Tally,
) -> Outcome {
    let mut progress = Progress::new("importing");
    let path = sink.path.clone();
    let mut deliver = |frame: Vec<u8>| {
        tally.take(&frame).map_err(|e| Failure::at(&path, e))?;
        sink.write(&frame, tally.last())?;
        let (objects, bytes) = (tally.objects(), tally.counts.bytes);
        progress.tell(|| format!("{objects} objects, {}", Size::new(bytes)));
        Ok(())
    };
    match source {
        Source::Directory(top) => walk::walk(top, rights.makes_devices(), report, &mut deliver),
        Source::Archive(archive) => {
            archive::read(archive, rights.makes_devices(), report, &mut deliver)
        }
    }
}

/// Reads the new tree again, and compares it with the frames that were handed over.
fn verify(sink: &Sink, rights: Rights, tally: &Tally) -> Outcome {
    let path = &sink.path;
    if !sink.is_mounted() {
        return Err(Failure::at(
            path,
            "--verify takes a mount, to read the tree again",
        ));
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = openat(CWD, path, flags, Mode::empty()).map_err(|e| Failure::system(path, e))?;
    let report = Report::new(path);
    let mut progress = Progress::new("verifying");
    let mut found = Tally::new(Some(rights.gives_all()));
    let mut tell = |name: &[u8]| report.tell(name, "differs from the source");
    walk::walk(top, true, &report, &mut |frame| {
        let compared = found.compare(&frame, tally, &mut tell);
        compared.map_err(|e| Failure::at(path, e))?;
        let (objects, bytes) = (found.objects(), found.counts.bytes);
        progress.tell(|| format!("{objects} objects, {}", Size::new(bytes)));
        Ok(())
    })?;
    found.compare_last(tally, &mut tell);
    let differing = tally.differences(&found);
    if differing > 0 || report.told() > 0 {
        let why = format!("{differing} objects differ from the source");
        return Err(Failure::at(path, why));
    }
    Ok(())
}

fn tell(imported: &Imported, begun: Instant, args: &Import) -> Outcome {
    let Imported { path, counts, told } = imported;
    imported.tell_refused(path);
    let seconds = begun.elapsed().as_secs_f64();
    let others = counts.symlinks + counts.specials + counts.links;
    let objects = counts.files + counts.directories + others;
    let rate = objects as f64 / seconds.max(0.001);
    if args.json {
        return say!(
            "{:#}",
            json!({
                "path": path.to_string_lossy(),
                "files": counts.files,
                "directories": counts.directories,
                "symlinks": counts.symlinks,
                "specials": counts.specials,
                "links": counts.links,
                "bytes": counts.bytes,
                "xattrs": counts.xattrs,
                "refused_xattrs": counts.refused_xattrs,
                "told": told,
                "is_verified": args.verify,
                "seconds": seconds,
                "objects_per_second": rate.round(),
            })
        );
    }
    say!(
        "{}: {} files, {} directories, {others} others, {} in {seconds:.2} s ({rate:.0} a second){}",
        path.display(),
        counts.files,
        counts.directories,
        Size::new(counts.bytes),
        if args.verify { ", verified" } else { "" }
    )
}

/// Raises the limit of open files to the highest that is allowed: each level of a tree is one.
pub fn allow_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    // A process that keeps its limit reads all but very deep trees.
    let _ = setrlimit(Resource::Nofile, raised);
}
