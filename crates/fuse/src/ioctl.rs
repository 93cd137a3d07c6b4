//! The control calls of [`ramet_fs::control`].

use std::sync::Arc;

use fuser::{Errno, ReplyIoctl};
use ramet_fs::control::{
    CHECKPOINT, CLONE, CLONE_NO_REPLACE, CloneRequest, DIFF, DIFF_START, DiffRequest, NameRequest,
    REMOVE, SOURCE, STAT, SYNC, USAGE, encode_source_reply, encode_stat_reply, encode_usage,
};
use ramet_fs::{Caller, DirStream, Error, Ino, Invalidation, Result, Volume};

use crate::asked::Asked;
use crate::errno::errno;
use crate::notify::Kernel;
use crate::tickets::Tickets;

/// A control call, decoded.
pub(crate) enum Call {
    Clone(CloneRequest),
    Remove(NameRequest),
    Source(NameRequest),
    Sync,
    Stat,
    Checkpoint,
    Diff(DiffRequest),
    Usage,
}

/// Who may compare trees: a comparison tells names and equality whatever the directories inside allow, so only those
/// who could read the volume itself.
fn may_compare(caller: &Caller) -> Result<()> {
    let is_ours = caller.uid == rustix::process::geteuid().as_raw();
    if caller.uid == 0 || is_ours {
        Ok(())
    } else {
        Err(Error::NotPermitted)
    }
}

/// How long a call may take.
pub(crate) enum Pace {
    /// As long as a lookup.
    Quick,
    /// As long as the device.
    Waits,
    /// It changes names, and so must be followed by invalidations.
    Structural,
}

impl Call {
    /// `None` for the number of somebody else's ioctl.
    pub(crate) fn decode(number: u32, bytes: &[u8]) -> Option<Result<Self>> {
        Some(match number {
            CLONE => CloneRequest::decode(bytes).map(Self::Clone),
            REMOVE => NameRequest::decode(bytes).map(Self::Remove),
            SOURCE => NameRequest::decode(bytes).map(Self::Source),
            SYNC => Ok(Self::Sync),
            STAT => Ok(Self::Stat),
            CHECKPOINT => Ok(Self::Checkpoint),
            DIFF => DiffRequest::decode(bytes).map(Self::Diff),
            USAGE => Ok(Self::Usage),
            _ => return None,
        })
    }

    /// Where it may be served.
    pub(crate) fn pace(&self) -> Pace {
        match self {
            Self::Clone(_) | Self::Remove(_) => Pace::Structural,
            Self::Sync | Self::Checkpoint | Self::Diff(_) | Self::Usage => Pace::Waits,
            Self::Source(_) | Self::Stat => Pace::Quick,
        }
    }

    /// Carries the call out, made on the open directory `dir` by `caller`, and answers it.
    pub(crate) fn serve(
        &self,
        volume: &Arc<Volume>,
        kernel: &Kernel,
        (tickets, asked): (&Tickets, &Asked),
        dir: (Ino, Option<&DirStream>),
        caller: &Caller,
        reply: ReplyIoctl,
    ) {
        match self.run(volume, (tickets, asked), dir, caller) {
            Ok((stale, data)) => {
                kernel.invalidate(&stale);
                reply.ioctl(0, &data);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn run(
        &self,
        volume: &Arc<Volume>,
        (tickets, asked): (&Tickets, &Asked),
        (dir, stream): (Ino, Option<&DirStream>),
        caller: &Caller,
    ) -> Result<(Vec<Invalidation>, Vec<u8>)> {
        let mut stale = Vec::new();
        let mut data = Vec::new();
        match self {
            Self::Clone(request) => {
                let no_replace = request.flags & CLONE_NO_REPLACE != 0;
                let source = tickets.redeem(caller, request.source)?;
                stale = volume.clone_entry(caller, source.ino, dir, &request.name, no_replace)?;
            }
            Self::Remove(request) => stale = volume.remove_tree(caller, dir, &request.name)?,
            Self::Source(request) => {
                let ticket = tickets.issue(volume, caller, dir, &request.name)?;
                data = encode_source_reply(ticket).to_vec();
            }
            Self::Sync => volume.sync_all()?,
            Self::Checkpoint => volume.checkpoint()?,
            Self::Diff(request) => {
                may_compare(caller)?;
                let starts = request.flags & DIFF_START != 0;
                let other = starts
                    .then(|| tickets.redeem(caller, request.other))
                    .transpose()?;
                let other = other.as_ref().map(|source| source.ino);
                data = volume.diff_page(stream.ok_or(Error::Stale)?, other)?;
            }
            Self::Usage => data = encode_usage(&volume.usage(dir)?),
            Self::Stat => {
                let invalid = Error::Invalid("counters");
                let Ok(mut counters) = serde_json::to_value(volume.stats()) else {
                    return Err(invalid);
                };
                counters["requests"] = asked.json();
                data = encode_stat_reply(&counters.to_string())?;
            }
        }
        Ok((stale, data))
    }
}

/// The control calls of a volume without a kernel.
#[cfg(fuzzing)]
pub struct Controls {
    volume: Arc<Volume>,
    tickets: Tickets,
}

#[cfg(fuzzing)]
impl Controls {
    /// Those of `volume`.
    #[must_use]
    pub fn new(volume: Arc<Volume>) -> Self {
        let tickets = Tickets::default();
        Self { volume, tickets }
    }

    /// What the ioctl `number` with `bytes`, made on the directory `dir` by `caller`, is answered; `None` when it is
    /// nobody's.
    pub fn call(
        &self,
        number: u32,
        bytes: &[u8],
        dir: (Ino, Option<&DirStream>),
        caller: &Caller,
    ) -> Option<Result<Vec<u8>>> {
        let call = Call::decode(number, bytes)?;
        let run = |call: Call| call.run(&self.volume, &self.tickets, dir, caller);
        Some(call.and_then(run).map(|(_, data)| data))
    }
}

/// What any other ioctl gets.
pub(crate) const UNKNOWN: Errno = Errno::ENOTTY;
