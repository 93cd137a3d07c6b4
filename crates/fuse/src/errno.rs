//! The one table from errors to errno.

use fuser::Errno;
use ramet_betree::Error as TreeError;
use ramet_fs::Error;

/// What a system call answers. Failures of the medium are logged here, where the error stops.
pub(crate) fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound => Errno::ENOENT,
        Error::Exists => Errno::EEXIST,
        Error::NotDirectory => Errno::ENOTDIR,
        Error::IsDirectory => Errno::EISDIR,
        Error::NotEmpty => Errno::ENOTEMPTY,
        Error::NameTooLong => Errno::ENAMETOOLONG,
        Error::SameFile | Error::Invalid(_) | Error::Tree(TreeError::Invalid(_)) => Errno::EINVAL,
        Error::CrossRoot => Errno::EXDEV,
        Error::NotPermitted => Errno::EPERM,
        Error::Access => Errno::EACCES,
        Error::Stale => Errno::ESTALE,
        Error::TooBig => Errno::EFBIG,
        Error::NoAttribute => Errno::ENODATA,
        Error::Range => Errno::ERANGE,
        Error::AttributeTooBig => Errno::E2BIG,
        Error::Unsupported => Errno::EOPNOTSUPP,
        Error::NoMoreData => Errno::ENXIO,
        Error::TooManyLinks => Errno::EMLINK,
        Error::Tree(TreeError::NoSpace) => Errno::ENOSPC,
        Error::Tree(TreeError::ReadOnly) => Errno::EROFS,
        Error::Corrupt { .. }
        | Error::OtherVersion { .. }
        | Error::Tree(
            TreeError::Io { .. }
            | TreeError::Corrupt { .. }
            | TreeError::Poisoned(_)
            | TreeError::NotAVolume(_),
        ) => {
            tracing::error!(%error, "input/output error");
            Errno::EIO
        }
    }
}
