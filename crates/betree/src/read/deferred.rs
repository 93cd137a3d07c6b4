//! A lookup of one key at one moment, in two steps: the first takes the answer of memory, the
//! second reads the nodes below on demand.
//!
//! A [`Snapshot`](crate::Snapshot) shares the memory buffer, so a writer copies the parts that it
//! changes while the snapshot lives. A deferred lookup takes the one message about its key out of
//! the buffer instead, and the root below it.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::Result;
use crate::key::translation::Translation;
use crate::node::buffer::Buffer;
use crate::node::handle::Handle;
use crate::node::message::{Point, RangeMsg};
use crate::read::cut::Base;
use crate::read::lookup::descend;
use crate::store::cache::NodeCache;

/// The value of one key at the moment of [`Tree::lookup_deferred`](crate::Tree::lookup_deferred).
#[derive(Debug)]
pub struct DeferredLookup<'a> {
    nodes: &'a NodeCache,
    found: Found,
}

#[derive(Debug)]
enum Found {
    Value(Option<Bytes>),
    Below {
        base: Base,
        key: Bytes,
        newer: Option<Point>,
    },
}

impl<'a> DeferredLookup<'a> {
    /// `own` makes an owned key, if the nodes below are needed.
    pub(crate) fn new<K: AsRef<[u8]>>(
        nodes: &'a NodeCache,
        (buffer, root): (&Buffer, &Arc<Handle>),
        key: K,
        own: impl FnOnce(K) -> Bytes,
    ) -> Self {
        let point = buffer.point(key.as_ref());
        let over = || buffer.range_over(key.as_ref());
        let found = match point {
            Some(point) if point.is_final() => Found::Value(point.apply(None)),
            newer => Found::Below {
                base: match over().map(|(_, entry)| &entry.msg) {
                    Some(RangeMsg::Null) => Base::Nothing,
                    Some(RangeMsg::Goto(target)) => {
                        Base::Node(target.node.clone(), target.translation.clone())
                    }
                    None => Base::Node(root.clone(), Translation::identity()),
                },
                newer: newer.cloned(),
                key: own(key),
            },
        };
        Self { nodes, found }
    }

    /// The value; `None` without one.
    ///
    /// # Errors
    /// `Io` and `Corrupt` when a node on the way cannot be read.
    pub fn get(self) -> Result<Option<Bytes>> {
        match self.found {
            Found::Value(value) => Ok(value),
            Found::Below { base, key, newer } => descend(self.nodes, base, key, newer),
        }
    }
}
