//! The one table from errors to errno.

use ramet_betree::Error as TreeError;
use ramet_fs::Error;
use rustix::io::Errno;

use super::Answer;

/// The result of a request that ends with `result`.
pub(crate) fn answer<T>(result: ramet_fs::Result<T>) -> Answer<T> {
    result.map_err(|error| errno(&error))
}

/// The errno of a system call that ends with `error`. Failures of the medium are logged here, where
/// the error stops.
fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound => Errno::NOENT,
        Error::Exists => Errno::EXIST,
        Error::NotDirectory => Errno::NOTDIR,
        Error::IsDirectory => Errno::ISDIR,
        Error::NotEmpty => Errno::NOTEMPTY,
        Error::NameTooLong => Errno::NAMETOOLONG,
        Error::SameFile | Error::Invalid(_) | Error::Tree(TreeError::Invalid(_)) => Errno::INVAL,
        Error::CrossRoot => Errno::XDEV,
        Error::NotPermitted => Errno::PERM,
        Error::Access => Errno::ACCESS,
        Error::Stale => Errno::STALE,
        Error::TooBig => Errno::FBIG,
        Error::NoAttribute => Errno::NODATA,
        Error::Range => Errno::RANGE,
        Error::AttributeTooBig => Errno::TOOBIG,
        Error::Unsupported => Errno::OPNOTSUPP,
        Error::NoMoreData => Errno::NXIO,
        Error::Busy => Errno::BUSY,
        Error::TooManyLinks => Errno::MLINK,
        Error::CheckTooLarge { .. } => Errno::NOMEM,
        Error::Tree(TreeError::NoSpace) => Errno::NOSPC,
        Error::Tree(TreeError::ReadOnly) => Errno::ROFS,
        Error::Deferred(_)
        | Error::SlotIndexMissing
        | Error::Corrupt { .. }
        | Error::OtherVersion { .. }
        | Error::Tree(
            TreeError::Io { .. }
            | TreeError::Corrupt { .. }
            | TreeError::Poisoned(_)
            | TreeError::NotResident
            | TreeError::NotAVolume(_),
        ) => {
            tracing::error!(%error, "input/output error");
            Errno::IO
        }
    }
}
