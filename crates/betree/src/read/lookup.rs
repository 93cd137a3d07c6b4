//! Lookups of one key, from the memory buffer down to the leaf.

use std::sync::Arc;

use bytes::Bytes;

use crate::counters::bump;
use crate::error::Result;
use crate::key::translation::Translation;
use crate::node::handle::{Handle, Kind};
use crate::node::message::{Point, RangeMsg};
use crate::node::run_view::{RangeAt, RunView};
use crate::node::skeleton::SegRef;
use crate::read::cut::{Base, check_falls, outside};
use crate::store::cache::NodeCache;

/// A frozen state of the whole tree.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) buffer: RunView,
    pub(crate) root: Arc<Handle>,
}

impl View {
    pub(crate) fn get(&self, nodes: &NodeCache, key: &[u8]) -> Result<Option<Bytes>> {
        let found = self.buffer.point(nodes, key)?;
        if found.as_ref().is_some_and(Point::is_final) {
            return Ok(found.and_then(|p| p.apply(None)));
        }
        let key = Bytes::copy_from_slice(key);
        let base = match self.buffer.range_at(&key) {
            RangeAt::Covered(_, RangeMsg::Null) => Base::Nothing,
            RangeAt::Covered(_, RangeMsg::Goto(target)) => {
                Base::Node(target.node, target.translation)
            }
            RangeAt::Until(_) => Base::Node(self.root.clone(), Translation::identity()),
        };
        descend(nodes, base, key, found)
    }
}

/// Follows one key down; `found` is the message of newer levels about it.
pub(crate) fn descend(
    nodes: &NodeCache,
    mut base: Base,
    mut key: Bytes,
    mut found: Option<Point>,
) -> Result<Option<Bytes>> {
    loop {
        let (node, translation) = match base {
            Base::Node(node, translation) => (node, translation),
            Base::Nothing | Base::Draft(_) => {
                return Ok(found.unwrap_or(Point::Delete).apply(None));
            }
        };
        if !translation.is_identity() {
            if !translation.maps(&key) {
                return Ok(found.unwrap_or(Point::Delete).apply(None));
            }
            key = translation.key(&key);
        }
        bump(&nodes.counters.node_visits);
        if node.kind() == Kind::Leaf {
            let value = nodes.run(&node)?.point(nodes, &key)?;
            let point = match (found, value) {
                (Some(newer), Some(older)) => newer.over(&older),
                (Some(point), None) | (None, Some(point)) => point,
                (None, None) => Point::Delete,
            };
            return Ok(point.apply(None));
        }
        let skeleton = nodes.skeleton(&node)?;
        if !skeleton.range().contains(&key) {
            return Err(outside(&skeleton));
        }
        let edge = &skeleton.edges[skeleton.edge_of(&key)];
        let mut next = edge.child.as_ref().map_or(Base::Nothing, |c| {
            Base::Node(c.node.clone(), c.translation.clone())
        });
        let shows = |s: &&SegRef| s.clip.contains(&key) && s.translation.maps(&key);
        for seg in skeleton.visible(edge).filter(shows) {
            bump(&nodes.counters.node_visits);
            let run = nodes.run(&seg.run)?;
            let moved = (!seg.translation.is_identity()).then(|| seg.translation.key(&key));
            let inside = moved.as_ref().unwrap_or(&key);
            if let Some(older) = run.point(nodes, inside)? {
                let point = match found {
                    Some(newer) => newer.over(&older),
                    None => older,
                };
                if point.is_final() {
                    return Ok(point.apply(None));
                }
                found = Some(point);
            }
            if seg.ranges_step() >= edge.watermark {
                match run.range_at(inside) {
                    RangeAt::Covered(_, RangeMsg::Null) => next = Base::Nothing,
                    RangeAt::Covered(_, RangeMsg::Goto(t)) => {
                        next = Base::Node(t.node, seg.translation.then(&t.translation, &key))
                    }
                    RangeAt::Until(_) => continue,
                }
                break;
            }
        }
        check_falls(node.height(), &next)?;
        base = next;
    }
}
