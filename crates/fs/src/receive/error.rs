//! The reasons for which a stream is not received.

use std::io;

use thiserror::Error;

use crate::format::stream::StreamId;

/// The reason for which a stream is not received.
#[derive(Debug, Error)]
pub enum ReceiveError {
    /// The bytes are no stream, or a damaged one.
    #[error("the stream cannot be read: {0}")]
    Stream(#[from] crate::Error),
    /// Items that make no sense one after the other.
    #[error("the stream makes no sense: {0}")]
    Order(&'static str),
    /// The stream is not whole.
    #[error("the stream ends early, behind section {0}")]
    Truncated(u64),
    /// The stream does not go on where the checkpoint is: behind this section, if there is one.
    #[error(
        "the stream does not begin with its first section, and {}",
        match .0 {
            Some(section) => format!("the sections up to {section} are here: --behind {section}"),
            None => "the sections before were not received".to_owned(),
        }
    )]
    Behind(Option<u64>),
    /// The sections are not those that the checkpoint is of.
    #[error(
        "it is not the stream that was begun here, though it is of the same trees: \
         'ramet receive --discard' removes the part that came of that"
    )]
    Foreign,
    /// The destination refuses.
    #[error("{}: {error}", String::from_utf8_lossy(.path))]
    Place {
        /// Root and path in it.
        path: Vec<u8>,
        /// The reason.
        error: io::Error,
    },
    /// A name is taken.
    #[error("{}: already exists: --replace replaces it", String::from_utf8_lossy(.0))]
    Exists(Vec<u8>),
    /// The name of an increment is taken by a directory that it has nothing to do with.
    #[error(
        "{}: is not the tree that the stream has the differences from: --force replaces it, too",
        String::from_utf8_lossy(.0)
    )]
    Unrelated(Vec<u8>),
    /// The tree that a root is made of is not there.
    #[error(
        "{}: made of the tree {id}, which was not received here (or was removed since): send it \
         without --from, or from another base",
        String::from_utf8_lossy(.name)
    )]
    NoBase {
        /// The root.
        name: Vec<u8>,
        /// The tree.
        id: StreamId,
    },
    /// The trees have their names, but a tree that was replaced cannot be removed.
    #[error("the trees are received, but those that they replaced stay in {0}: {1}")]
    Left(String, io::Error),
}

impl ReceiveError {
    /// Whether the same stream may be received later.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        use io::ErrorKind::{
            AlreadyExists, InvalidInput, IsADirectory, NotADirectory, NotFound, PermissionDenied,
            Unsupported,
        };
        match self {
            Self::Stream(_) | Self::Truncated(_) | Self::Exists(_) | Self::Unrelated(_) => true,
            Self::Left(..) => true,
            Self::Order(_) | Self::Behind(_) | Self::Foreign | Self::NoBase { .. } => false,
            // The same items would meet the same refusal.
            Self::Place { error, .. } => !matches!(
                error.kind(),
                AlreadyExists
                    | InvalidInput
                    | IsADirectory
                    | NotADirectory
                    | NotFound
                    | PermissionDenied
                    | Unsupported
            ),
        }
    }
}

pub(crate) type Received<T = ()> = std::result::Result<T, ReceiveError>;

pub(crate) fn place(path: &[u8], error: io::Error) -> ReceiveError {
    ReceiveError::Place {
        path: path.to_vec(),
        error,
    }
}
