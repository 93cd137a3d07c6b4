//! `ramet receive`: the trees of a stream on standard input.
//!
//! The library makes the trees (`ramet_fs::Receiver`) in a hidden directory beside their names: on a
//! mount by calls of the system and of the daemon (`receive/on_mount.rs`), so the rights of the user
//! are the kernel's to check, and in a volume that is not mounted by the library itself.

mod on_mount;

use std::io::{self, IsTerminal, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ramet_fs::{
    Destination, InVolume, ReceiveCounts, ReceiveError, Receiver, Replace, SECTION_HEAD_BYTES,
    STREAM_HEAD_BYTES, SectionHead, StreamId, Unfinished, decode_stream_head, discard, unfinished,
};
use rustix::fs::{FileType, Stat, fstat};
use serde_json::json;

use crate::args::Receive;
use crate::failure::{Failure, Outcome, reason};
use crate::import::allow_open_files;
use crate::import::rights::Rights;
use crate::import::sink::caller_of;
use crate::output::{complain, say};
use crate::progress::Progress;
use crate::receive::on_mount::OnMount;
use crate::size::Size;
use crate::unmounted::{self, directory_in_volume, find, names_of};

/// A stream that was received.
struct Received {
    names: Vec<String>,
    counts: ReceiveCounts,
}

pub fn run(args: &Receive) -> Outcome {
    if args.unfinished || args.discard {
        return match directory_in_volume(&args.dir) {
            Some(_) => in_volume(args, |place| tell_unfinished(args, place)),
            None => tell_unfinished(args, OnMount::open(&args.dir)?),
        };
    }
    if io::stdin().is_terminal() {
        return Err(Failure::new(
            "a stream does not come from a terminal: 'ramet receive DIR < STREAM'",
        ));
    }
    let begun = Instant::now();
    allow_open_files();
    let mut input = io::stdin().lock();
    let mut head = [0; STREAM_HEAD_BYTES];
    input.read_exact(&mut head).map_err(input_failed)?;
    let stream = decode_stream_head(&head).map_err(Failure::new_from)?;
    let stream = (stream, &mut input as &mut dyn Read);
    let received = match directory_in_volume(&args.dir) {
        Some(_) => in_volume(args, |place| receive(args, place, stream))?,
        None => receive(args, OnMount::open(&args.dir)?, stream)?,
    };
    tell(&received, begun, args)
}

/// Runs `work` on the directory in a volume that is not mounted.
fn in_volume<T>(args: &Receive, work: impl FnOnce(InVolume) -> Outcome<T>) -> Outcome<T> {
    let (image, inside) = directory_in_volume(&args.dir).expect("it was asked for one");
    let volume = unmounted::open(image, args.memory)?;
    let done = find(&volume, &names_of(inside))
        .map_err(|e| Failure::at(&args.dir, e))
        .and_then(|dir| {
            let caller = caller_of(Rights::of_process());
            work(InVolume::new(Arc::clone(&volume), caller, dir))
        });
    let closed = volume.close().map_err(|e| Failure::at(image, e));
    let done = done?;
    closed?;
    Ok(done)
}

/// Tells the streams that were begun, or removes them.
fn tell_unfinished(args: &Receive, mut place: impl Destination) -> Outcome {
    let found = unfinished(&mut place).map_err(|e| refusal(&e))?;
    let mut told = Vec::new();
    for one in found {
        if args.discard && !one.is_busy {
            discard(&mut place, one.stream).map_err(|e| refusal(&e))?;
        }
        told.push(json!({
            "stream": one.stream.to_string(),
            "behind": one.behind,
            "busy": one.is_busy,
        }));
        if args.json {
            continue;
        }
        let state = match one {
            Unfinished { is_busy: true, .. } => "is being received".to_owned(),
            _ if args.discard => "removed".to_owned(),
            Unfinished {
                behind: Some(section),
                ..
            } => format!("goes on behind section {section}"),
            _ => "has no checkpoint".to_owned(),
        };
        say!("{}: {state}", one.stream)?;
    }
    match args.json {
        true => say!("{:#}", json!(told)),
        false => Ok(()),
    }
}

fn input_failed(e: io::Error) -> Failure {
    match e.kind() {
        io::ErrorKind::UnexpectedEof => Failure::new("the stream ends early"),
        _ => Failure::system(Path::new("standard input"), e),
    }
}

/// Receives all sections. A failure leaves nothing, unless the stream may go on later: then the user
/// is told how.
fn receive(
    args: &Receive,
    place: impl Destination,
    (stream, input): (StreamId, &mut dyn Read),
) -> Outcome<Received> {
    let replace = match (args.replace, args.force) {
        (false, _) => Replace::Nothing,
        (true, false) => Replace::Known,
        (true, true) => Replace::Anything,
    };
    let mut receiver = Receiver::new(place, stream, replace);
    let finish = |receiver: &mut Receiver<_>| receiver.finish().map_err(|e| (refusal(&e), e));
    let done = take_all(&mut receiver, input).and_then(|()| finish(&mut receiver));
    let names = receiver.names();
    let names = names.map(|name| String::from_utf8_lossy(name).into_owned());
    let names = names.collect();
    let (failure, error) = match done {
        Ok(counts) => return Ok(Received { names, counts }),
        Err(failed) => failed,
    };
    let comes_again = stream.comes_again() || is_file(io::stdin());
    match receiver.give_up(&error, comes_again) {
        Ok(Some(section)) => complain(format_args!(
            "{}: the same stream goes on behind section {section} ('ramet send --behind \
             {section}' leaves the sections before out; 'ramet receive --discard' gives it up)",
            args.dir.display()
        )),
        Ok(None) => {}
        Err(left) => complain(refusal(&left)),
    }
    Err(failure)
}

/// Whether the input is a file, which can be read again.
fn is_file(input: impl AsFd) -> bool {
    let is_regular = |stat: Stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    fstat(input).is_ok_and(is_regular)
}

/// Takes all sections. A failure comes with its reason.
fn take_all<D: Destination>(
    receiver: &mut Receiver<D>,
    input: &mut dyn Read,
) -> Result<(), (Failure, ReceiveError)> {
    let mut progress = Progress::new("receiving");
    let (mut head, mut stored) = ([0; SECTION_HEAD_BYTES], Vec::new());
    let with_failure = |error: ReceiveError| (refusal(&error), error);
    loop {
        let behind = receiver.section();
        let cut = |e| (input_failed(e), ReceiveError::Truncated(behind));
        input.read_exact(&mut head).map_err(cut)?;
        let found = SectionHead::decode(&head).map_err(|e| with_failure(e.into()))?;
        stored.resize(found.stored_bytes, 0);
        input.read_exact(&mut stored).map_err(cut)?;
        receiver.take(&head, &stored).map_err(with_failure)?;
        let counts = receiver.counts();
        let objects = counts.files + counts.directories + counts.copies;
        let bytes = counts.bytes;
        progress.tell(|| format!("{objects} objects, {}", Size::new(bytes)));
        if found.is_last {
            return Ok(());
        }
    }
}

fn refusal(error: &ReceiveError) -> Failure {
    match error {
        ReceiveError::Place { path, error } => {
            let path = String::from_utf8_lossy(path);
            Failure::at(Path::new(&*path), reason(error))
        }
        error => Failure::new_from(error),
    }
}

fn tell(received: &Received, begun: Instant, args: &Receive) -> Outcome {
    let Received { names, counts } = received;
    if counts.refused_xattrs > 0 {
        complain(format_args!(
            "{}: {} extended attributes were left out",
            args.dir.display(),
            counts.refused_xattrs
        ));
    }
    let seconds = begun.elapsed().as_secs_f64();
    if args.json {
        return say!(
            "{:#}",
            json!({
                "names": names,
                "files": counts.files,
                "directories": counts.directories,
                "copies": counts.copies,
                "removed": counts.removed,
                "bytes": counts.bytes,
                "refused_xattrs": counts.refused_xattrs,
                "resumed_behind": counts.resumed_behind,
                "seconds": seconds,
            })
        );
    }
    say!(
        "{}: {}: {} files, {} directories and {} copies, {} names removed, {} in {seconds:.2} s",
        args.dir.display(),
        names.join(", "),
        counts.files,
        counts.directories,
        counts.copies,
        counts.removed,
        Size::new(counts.bytes),
    )
}
