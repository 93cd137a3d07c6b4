//! The control calls of [`ramet_fs::control`].

use fuser::{Errno, ReplyIoctl};
use ramet_fs::control::{
    CHECKPOINT, CLONE, CLONE_NO_REPLACE, CloneRequest, DIFF, DiffRequest, REMOVE, RemoveRequest,
    STAT, SYNC, USAGE, encode_stat_reply, encode_usage,
};
use ramet_fs::{Caller, DirStream, Error, Ino, Invalidation, Result, Volume};

use crate::errno::errno;
use crate::notify::Kernel;

/// A control call, decoded.
pub(crate) enum Call {
    Clone(CloneRequest),
    Remove(RemoveRequest),
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

impl Call {
    /// `None` for the number of somebody else's ioctl.
    pub(crate) fn decode(number: u32, bytes: &[u8]) -> Option<Result<Self>> {
        Some(match number {
            CLONE => CloneRequest::decode(bytes).map(Self::Clone),
            REMOVE => RemoveRequest::decode(bytes).map(Self::Remove),
            SYNC => Ok(Self::Sync),
            STAT => Ok(Self::Stat),
            CHECKPOINT => Ok(Self::Checkpoint),
            DIFF => DiffRequest::decode(bytes).map(Self::Diff),
            USAGE => Ok(Self::Usage),
            _ => return None,
        })
    }

    /// Whether it changes names, and so must be followed by invalidations.
    pub(crate) fn is_structural(&self) -> bool {
        matches!(self, Self::Clone(_) | Self::Remove(_))
    }

    /// Carries the call out, made on the open directory `dir` by `caller`, and answers it.
    pub(crate) fn serve(
        &self,
        volume: &Volume,
        kernel: &Kernel,
        dir: (Ino, Option<&DirStream>),
        caller: &Caller,
        reply: ReplyIoctl,
    ) {
        match self.run(volume, dir, caller) {
            Ok((stale, data)) => {
                kernel.invalidate(&stale);
                reply.ioctl(0, &data);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn run(
        &self,
        volume: &Volume,
        (dir, stream): (Ino, Option<&DirStream>),
        caller: &Caller,
    ) -> Result<(Vec<Invalidation>, Vec<u8>)> {
        let mut stale = Vec::new();
        let mut data = Vec::new();
        match self {
            Self::Clone(request) => {
                let no_replace = request.flags & CLONE_NO_REPLACE != 0;
                stale = volume.clone_entry(
                    caller,
                    Ino(request.src_ino),
                    dir,
                    &request.name,
                    no_replace,
                )?;
            }
            Self::Remove(request) => stale = volume.remove_tree(caller, dir, &request.name)?,
            Self::Sync => volume.sync_all()?,
            Self::Checkpoint => volume.checkpoint()?,
            Self::Diff(request) => {
                may_compare(caller)?;
                data = volume.diff_page(stream.ok_or(Error::Stale)?, request)?;
            }
            Self::Usage => data = encode_usage(&volume.usage(dir)?),
            Self::Stat => {
                let json = serde_json::to_string(&volume.stats())
                    .map_err(|_| Error::Invalid("counters"))?;
                data = encode_stat_reply(&json)?;
            }
        }
        Ok((stale, data))
    }
}

/// What any other ioctl gets.
pub(crate) const UNKNOWN: Errno = Errno::ENOTTY;
