//! The stages of streams that were not received to the end.

use std::io;

use crate::format::stream::StreamId;
use crate::receive::destination::Destination;
use crate::receive::error::{Received, place};
use crate::receive::staged::{STAGE, Staged, stage_of};

/// A stream that was begun, and is not received to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The stream.
    pub stream: StreamId,
    /// The section behind which it goes on, if there is a checkpoint.
    pub behind: Option<u64>,
    /// Another process is receiving it.
    pub is_busy: bool,
}

/// The streams of the caller that were begun in a destination.
///
/// # Errors
/// See [`ReceiveError`](crate::ReceiveError).
pub fn unfinished(to: &mut impl Destination) -> Received<Vec<Unfinished>> {
    let mut found = Vec::new();
    let names = to.stages(STAGE).map_err(|error| place(b"", error))?;
    for name in names {
        let digits = name.strip_prefix(STAGE).filter(|text| text.len() == 32);
        let id = digits.and_then(|text| u128::from_str_radix(text, 16).ok());
        let Some(stream) = id.map(|id| StreamId(id.to_be_bytes())) else {
            continue;
        };
        let failed = |error| place(name.as_bytes(), error);
        let (behind, is_busy) = match to.open_stage(&name, false) {
            Ok(false) => continue,
            Ok(true) => {
                let staged = Staged::of(to.staged_names().map_err(failed)?);
                (staged.checkpoint.map(|(section, _)| section), false)
            }
            Err(error) => match error.kind() {
                io::ErrorKind::ResourceBusy => (None, true),
                // The stage of another user.
                io::ErrorKind::AlreadyExists | io::ErrorKind::PermissionDenied => continue,
                _ => return Err(failed(error)),
            },
        };
        found.push(Unfinished {
            stream,
            behind,
            is_busy,
        });
    }
    Ok(found)
}

/// Removes the stage of a stream that was begun in a destination. Trees that have their names stay.
///
/// # Errors
/// See [`ReceiveError`](crate::ReceiveError).
pub fn discard(to: &mut impl Destination, stream: StreamId) -> Received {
    let name = stage_of(stream);
    let done = to.open_stage(&name, false).and_then(|_| to.drop_stage());
    let done = done.and_then(|()| to.sync());
    done.map_err(|error| place(name.as_bytes(), error))
}
