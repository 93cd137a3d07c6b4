//! Writes of nodes to the device.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ramet_block::{BLOCK_BYTES, Call, Device, checksum, is_no_space};
use ramet_nodetable::{NodeId, NodeTable};

use crate::counters::Counters;
use crate::error::{Error, Result, io_error_at};
use crate::key::range::KeyRange;
use crate::node::buffer::Buffer;
use crate::node::handle::{Handle, Kind, Place};
use crate::node::packed::PackedBuilder;
use crate::node::run_builder::{RunImage, segment_image};
use crate::node::trailer::{Opening, TRAILER_BYTES, Trailer};
use crate::shape::TreeShape;
use crate::store::cache::NodeCache;
use crate::store::fragments::{Fragment, Fragments, halves};
use crate::store::handles::Handles;
use crate::store::space::Space;

/// The path of a write to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    /// Through the cache of the device: a reader finds the node there soon.
    Cache,
    /// Past that cache: large, and not read by the tree itself soon.
    Bulk,
}

/// Writes nodes. It has no lock: only the checkpoint writes fresh nodes, and other new nodes have
/// no handle yet.
pub(crate) struct WriteBack {
    dev: Arc<dyn Device>,
    table: Arc<NodeTable>,
    space: Arc<Space>,
    handles: Arc<Handles>,
    nodes: Arc<NodeCache>,
    shape: Arc<TreeShape>,
    counters: Arc<Counters>,
    opening: Opening,
}

/// Bytes of the extent of a node of `used` bytes.
fn extent_bytes(used: usize) -> u64 {
    ((used + TRAILER_BYTES) as u64).next_multiple_of(BLOCK_BYTES)
}

impl WriteBack {
    /// Writes to `dev`, in space of `table`, nodes of an `opening`.
    pub(crate) fn new(
        (dev, table, opening): (Arc<dyn Device>, Arc<NodeTable>, Opening),
        space: Arc<Space>,
        handles: Arc<Handles>,
        nodes: Arc<NodeCache>,
        shape: Arc<TreeShape>,
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            dev,
            table,
            space,
            handles,
            nodes,
            shape,
            counters,
            opening,
        }
    }

    /// Packs a segment of points that is in memory only. Other contents stay as they are.
    pub(crate) fn pack(&self, handle: &Handle) {
        let Some(run) = self
            .handles
            .dirty
            .run(handle)
            .filter(|run| run.range_count() == 0)
        else {
            return;
        };
        let mut builder = PackedBuilder::new(self.shape.block_bytes);
        for (key, point) in run.points() {
            builder.add(key, point);
        }
        let Some(packed) = builder.finish() else {
            return;
        };
        self.handles.dirty.set_packed(handle, packed);
    }

    /// Writes a run now, if that leaves space for the next checkpoint. The run is durable with the
    /// next checkpoint that names it.
    pub(crate) fn write_run(&self, image: RunImage, via: Via) -> Result<Arc<Handle>> {
        let _reservation = self.space.reserve(extent_bytes(image.bytes.len()))?;
        let id = self.handles.new_id();
        let place =
            self.write_node((id, image.kind, 0), image.bytes, image.checksum, false, via)?;
        let handle = self
            .handles
            .unrecorded((id, image.kind), place, image.children, false);
        // The caller that makes an edge to the run looks at its index, and so need not read it.
        if let Some(index) = image.index {
            self.nodes.keep_index(handle.id(), index);
        }
        Ok(handle)
    }

    fn write_node(
        &self,
        (id, kind, height): (NodeId, Kind, u32),
        mut bytes: Vec<u8>,
        sum: u64,
        reserved: bool,
        via: Via,
    ) -> Result<Place> {
        let used_bytes = u32::try_from(bytes.len()).expect("a node is far below 4 GiB");
        let len = extent_bytes(bytes.len());
        let extent = if reserved {
            self.table.space().alloc_reserved(len)
        } else {
            self.table.space().alloc(len)
        }?;
        let place = Place {
            extent,
            used_bytes,
            checksum: sum,
        };
        // Whole blocks: a partial block would make the device read before it writes.
        let end = usize::try_from(extent.len).expect("a node fits memory");
        bytes.resize(end - TRAILER_BYTES, 0);
        let trailer = Trailer {
            id,
            opening: self.opening.number,
            kind,
            height,
            place,
        };
        bytes.extend(trailer.encode(self.opening.seed));
        let counter = match kind {
            Kind::Leaf => &self.counters.leaves_written_bytes,
            Kind::Segment => &self.counters.segments_written_bytes,
            Kind::Skeleton => &self.counters.skeletons_written_bytes,
        };
        for counter in [counter, &self.counters.bytes_written] {
            counter.fetch_add(extent.len, Ordering::Relaxed);
        }
        let written = match via {
            Via::Cache => self.dev.write_at(extent.addr, &bytes),
            Via::Bulk => self.dev.write_bulk(extent.addr, &bytes),
        };
        if let Err(e) = written {
            self.table.space().free_unpublished(extent);
            if is_no_space(&e) {
                // The host could not promise the space. No node refers to this one yet.
                return Err(Error::NoSpace);
            }
            return Err(io_error_at(Call::Write, "a node", extent.addr)(e));
        }
        Ok(place)
    }

    /// Writes a new segment for a checkpoint.
    fn write_segment(&self, image: RunImage) -> Result<Arc<Handle>> {
        let id = self.handles.new_id();
        let node = (id, image.kind, 0);
        let place = self.write_node(node, image.bytes, image.checksum, true, Via::Cache)?;
        let node = (id, image.kind);
        Ok(self.handles.unrecorded(node, place, image.children, false))
    }

    /// Writes a fresh segment or skeleton whose children are all written. Other nodes stay as they
    /// are. A segment without a hole goes to `fragments` and stays fresh.
    pub(crate) fn write_back(&self, handle: &Arc<Handle>, fragments: &mut Fragments) -> Result<()> {
        let (codec, block_bytes) = (self.shape.codec, self.shape.block_bytes);
        if let Some(segment) = self.handles.dirty.segment(handle) {
            let image = match &segment {
                Err(run) => segment_image(run, codec, block_bytes),
                Ok(packed) => packed.image(codec),
            };
            let len = extent_bytes(image.bytes.len());
            let node = (handle.id(), image.kind, 0);
            match self.write_node(node, image.bytes, image.checksum, true, Via::Cache) {
                Ok(place) => {
                    // The next flush measures its pressure.
                    if let Some(index) = image.index {
                        self.nodes.keep_index(handle.id(), index);
                    }
                    self.become_written(handle, place, image.children);
                }
                Err(Error::NoSpace) if self.table.stats().backed >= len => {
                    let run = match segment {
                        Ok(packed) => Arc::new(packed.to_mem()),
                        Err(run) => run,
                    };
                    // The reservation is released when the last node that refers to the segment has
                    // gone: other fragments may find no space, and then all of the segment is
                    // written once more.
                    fragments.insert(handle.id(), self.write_fragments(&run)?);
                }
                Err(error) => return Err(error),
            }
        } else if let Some(node) = self.handles.dirty.skeleton(handle) {
            let node = node.with_fragments(fragments).map_or(node, Arc::new);
            let bytes = node.encode();
            let sum = checksum(&bytes);
            let which = (handle.id(), Kind::Skeleton, handle.height());
            let place = self.write_node(which, bytes, sum, true, Via::Cache)?;
            let children = node.children().cloned().collect();
            self.nodes.keep_skeleton(handle.id(), node);
            self.become_written(handle, place, children);
        }
        Ok(())
    }

    fn become_written(&self, handle: &Handle, place: Place, children: Vec<Arc<Handle>>) {
        if let Some(reservation) = self.handles.dirty.set_written(handle, place, children) {
            reservation.commit();
        }
    }

    /// Writes `run` as several segments, each of which fits a hole.
    ///
    /// # Errors
    /// `NoSpace` when there is no hole even for a single message; nothing stays allocated then.
    fn write_fragments(&self, run: &Buffer) -> Result<Vec<Fragment>> {
        let mut done = Vec::new();
        let mut todo = Vec::from(halves(KeyRange::all(), run)?);
        while let Some((range, part)) = todo.pop() {
            match self.write_segment(segment_image(
                &part,
                self.shape.codec,
                self.shape.block_bytes,
            )) {
                Ok(run) => done.push(Fragment {
                    range,
                    run,
                    bytes: part.size_bytes() as u64,
                }),
                Err(Error::NoSpace) => todo.extend(halves(range, &part)?),
                Err(error) => return Err(error),
            }
        }
        Ok(done)
    }
}
