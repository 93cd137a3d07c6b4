//! `ramet receive`: the trees of a stream on standard input.
//!
//! The library makes the trees (`ramet_fs::Receiver`) in a hidden directory beside their names: on a
//! mount by calls of the system and of the daemon (`receive/on_mount.rs`), so the rights of the user
//! are the kernel's to check, and in a volume that is not mounted by the library itself.

mod on_mount;

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ramet_fs::{
    Destination, InVolume, ReceiveCounts, ReceiveError, Receiver, SECTION_HEAD_BYTES,
    STREAM_HEAD_BYTES, SectionHead, StreamId, Volume, decode_stream_head,
};
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
    let received = match directory_in_volume(&args.dir) {
        Some((image, inside)) => {
            let volume = unmounted::open(image, args.memory)?;
            let received = in_volume(args, &volume, inside, (stream, &mut input));
            let closed = volume.close().map_err(|e| Failure::at(image, e));
            let received = received?;
            closed?;
            received
        }
        None => {
            let place = OnMount::open(&args.dir)?;
            receive(args, place, (stream, &mut input))?
        }
    };
    tell(&received, begun, args)
}

fn in_volume(
    args: &Receive,
    volume: &Arc<Volume>,
    inside: &OsStr,
    stream: (StreamId, &mut dyn Read),
) -> Outcome<Received> {
    let dir = find(volume, &names_of(inside)).map_err(|e| Failure::at(&args.dir, e))?;
    let caller = caller_of(Rights::of_process());
    receive(args, InVolume::new(Arc::clone(volume), caller, dir), stream)
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
    let mut receiver = Receiver::new(place, stream, args.replace);
    let done = take_all(&mut receiver, input)
        .and_then(|()| receiver.finish().map_err(|e| (refusal(&e), goes_on(&e))));
    let names = receiver.names();
    let names = names.map(|name| String::from_utf8_lossy(name).into_owned());
    let names = names.collect();
    match (done, receiver.checkpoint()) {
        (Ok(counts), _) => Ok(Received { names, counts }),
        (Err((failure, true)), Some(section)) => {
            complain(format_args!(
                "{}: the same stream goes on behind section {section} ('ramet send --behind \
                 {section}' leaves the sections before out)",
                args.dir.display()
            ));
            Err(failure)
        }
        (Err((failure, _)), _) => {
            if let Err(left) = receiver.discard() {
                complain(refusal(&left));
            }
            Err(failure)
        }
    }
}

/// Whether the same stream may be received later.
fn goes_on(error: &ReceiveError) -> bool {
    match error {
        ReceiveError::Truncated(_) | ReceiveError::Place { .. } | ReceiveError::Exists(_) => true,
        ReceiveError::Stream(_) | ReceiveError::Order(_) | ReceiveError::NoBase { .. } => false,
    }
}

/// Takes all sections. A failure comes with the answer whether the stream may go on later.
fn take_all<D: Destination>(
    receiver: &mut Receiver<D>,
    input: &mut dyn Read,
) -> Result<(), (Failure, bool)> {
    let mut progress = Progress::new("receiving");
    let (mut head, mut stored) = ([0; SECTION_HEAD_BYTES], Vec::new());
    let cut = |e| (input_failed(e), true);
    loop {
        input.read_exact(&mut head).map_err(cut)?;
        let found = SectionHead::decode(&head).map_err(|e| (Failure::new_from(e), false))?;
        stored.resize(found.stored_bytes, 0);
        input.read_exact(&mut stored).map_err(cut)?;
        let taken = receiver.take(&head, &stored);
        taken.map_err(|e| (refusal(&e), goes_on(&e)))?;
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
