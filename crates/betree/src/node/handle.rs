//! Identity of a node: its id, its kind and where its bytes lie.

use ramet_block::Extent;
use ramet_nodetable::NodeKind;

/// What a node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Leaf = 1,
    Segment = 2,
    Skeleton = 3,
}

impl Kind {
    pub(crate) fn in_table(self) -> NodeKind {
        match self {
            Kind::Leaf => NodeKind::Leaf,
            Kind::Segment => NodeKind::Segment,
            Kind::Skeleton => NodeKind::Skeleton,
        }
    }
}

/// Where a node's bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) extent: Extent,
    pub(crate) used_bytes: u32,
    /// Of the whole node, or of the front part of a run.
    pub(crate) checksum: u64,
}
