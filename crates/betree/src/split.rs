//! A node with too many edges becomes several.

use crate::bounds::KeyRange;
use crate::error::Result;
use crate::node::{Store, bump};
use crate::skeleton::{Edge, Skeleton};

impl Store {
    /// Cuts a node with too many edges, preferring borders with a short common prefix (*preferential
    /// splitting*; BetrFS 0.5, section 4).
    pub(crate) fn split(&self, node: Skeleton) -> Result<Vec<Skeleton>> {
        if node.edges.len() <= self.shape.fanout {
            return Ok(vec![node]);
        }
        bump(&self.counters.splits);
        let parts = node
            .edges
            .len()
            .div_ceil((self.shape.fanout * 3 / 4).max(2))
            .max(2);
        let step = node.edges.len() / parts;
        let mut cuts: Vec<usize> = Vec::new();
        for n in 1..parts {
            let (from, to) = (n * step - step / 4, n * step + step / 4);
            let from = from.max(cuts.last().map_or(1, |c| c + 1));
            let best = (from..=to.max(from))
                .min_by_key(|&at| node.edges[at].lo.len())
                .expect("the range is not empty");
            cuts.push(best);
        }
        let mut out = Vec::with_capacity(parts);
        let mut from = 0;
        for to in cuts.into_iter().chain([node.edges.len()]) {
            let hi = node.edge_hi(to - 1);
            let mut part = node.clipped(&KeyRange::new(node.edges[from].lo.clone(), hi));
            self.drop_dead_segments(&mut part)?;
            out.push(part);
            from = to;
        }
        Ok(out)
    }

    /// The node, with as many levels more as its edges need.
    pub(crate) fn within_fanout(&self, mut node: Skeleton) -> Result<Skeleton> {
        while node.edges.len() > self.shape.fanout {
            let (hi, next_ord) = (node.hi.clone(), node.next_ord);
            let mut edges = Vec::new();
            for part in self.split(node)? {
                edges.push(Edge {
                    lo: part.range().lo,
                    watermark: 0,
                    child: Some(self.child_of(part, 0)),
                });
            }
            node = Skeleton {
                height: 1,
                hi,
                edges,
                segs: Vec::new(),
                next_ord,
            };
        }
        node.height = node.label();
        Ok(node)
    }
}
