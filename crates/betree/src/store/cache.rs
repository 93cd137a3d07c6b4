//! Parts of nodes in the cache, each weighed by its bytes.

use std::sync::Arc;

use quick_cache::Weighter;

use crate::node::block::Block;
use crate::node::run_index::RunIndex;
use crate::node::skeleton::Skeleton;

#[derive(Clone)]
pub(crate) enum Cached {
    Skeleton(Arc<Skeleton>),
    Index(Arc<RunIndex>),
    Block(Arc<Block>),
}

#[derive(Clone)]
pub(crate) struct ByBytes;

impl Weighter<CacheKey, Cached> for ByBytes {
    fn weight(&self, _key: &CacheKey, value: &Cached) -> u64 {
        match value {
            Cached::Skeleton(node) => node.memory_bytes() as u64,
            Cached::Index(index) => index.memory_bytes() as u64,
            Cached::Block(block) => block.memory_bytes() as u64 + 64,
        }
    }
}

/// Part of a node in the cache: 0 is the skeleton or the index, `n + 1` block `n`.
pub(crate) type CacheKey = (u64, u32);

/// Which of the blocks that one request reads go into the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keeping {
    All,
    /// The first and the last, which the requests before and after may need as well.
    Ends,
}
