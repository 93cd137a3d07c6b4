//! Writes of nodes to the device.
//!
//! A node takes whole blocks. A clone whose state is edited gets a new skeleton and a new segment,
//! which are a few hundred bytes each. So a skeleton may be the *guest* of a segment that it names:
//!
//! ```text
//!   extent   segment (carrier) | skeleton (guest) | zeros | trailer of the guest | trailer of the carrier
//! ```
//!
//! Both stay nodes with numbers, records and references of their own. The segment owns the extent.
//! It outlives its guest, which names it, and other skeletons may name it as well. So the block
//! that the pair saves is saved for good, and no node is written for the sake of the other one.
//! A guest takes room that the blocks of the segment have left, and adds no block.
//! The root is nobody's guest, since its skeleton is kept twice.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ramet_block::{BLOCK_BYTES, Call, Device, Extent, checksum, is_no_space};
use ramet_nodetable::{NodeId, NodeTable};

use crate::counters::Counters;
use crate::error::{Error, Result, io_error_at};
use crate::key::range::KeyRange;
use crate::node::buffer::Buffer;
use crate::node::handle::{Handle, Kind, Place};
use crate::node::packed::{PackedBuilder, PackedRun};
use crate::node::run_builder::{RunImage, segment_image};
use crate::node::run_index::RUN_HEADER_BYTES;
use crate::node::skeleton::Skeleton;
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

/// Longest extent that a skeleton shares with a segment, in bytes. A node larger than that does not
/// miss the block.
const SHARED_EXTENT_BYTES: u64 = 4 * BLOCK_BYTES;

/// Bytes of the extent of a node of `used` bytes.
fn extent_bytes(used: usize) -> u64 {
    ((used + TRAILER_BYTES) as u64).next_multiple_of(BLOCK_BYTES)
}

/// Checks that all nodes that a skeleton names are written, but for its carrier, which is written
/// with it.
///
/// # Errors
/// `Corrupt`: the record of the skeleton would name a node without a record.
fn check_written(node: &Skeleton, carrier: Option<&Arc<Handle>>) -> Result<()> {
    let carrier = carrier.map(|carrier| carrier.id());
    let mut children = node.children();
    let fresh = children.find(|child| child.is_fresh() && Some(child.id()) != carrier);
    let Some(fresh) = fresh else {
        return Ok(());
    };
    debug_assert!(false, "N3: a skeleton before {fresh:?}, which it names");
    Err(Error::Corrupt {
        what: "checkpoint",
        addr: 0,
        detail: format!(
            "N3: a skeleton names node {}, which is not written",
            fresh.id().0
        ),
    })
}

/// A node as it is written.
struct Part {
    id: NodeId,
    kind: Kind,
    height: u32,
    bytes: Vec<u8>,
    checksum: u64,
}

/// The contents of a segment that is not written, packed or not.
type FreshSegment = std::result::Result<Arc<PackedRun>, Arc<Buffer>>;

impl Part {
    /// A run that is to become node `id`.
    fn run(id: NodeId, kind: Kind, bytes: Vec<u8>, checksum: u64) -> Self {
        Self {
            id,
            kind,
            height: 0,
            bytes,
            checksum,
        }
    }

    fn skeleton(handle: &Handle, node: &Skeleton) -> Self {
        let bytes = node.encode();
        Self {
            id: handle.id(),
            kind: Kind::Skeleton,
            height: handle.height(),
            checksum: checksum(&bytes),
            bytes,
        }
    }

    fn extent_bytes(&self) -> u64 {
        extent_bytes(self.bytes.len())
    }

    fn place(&self, extent: Extent, offset: u32) -> Place {
        Place {
            extent,
            offset,
            used_bytes: u32::try_from(self.bytes.len()).expect("a node is far below 4 GiB"),
            checksum: self.checksum,
        }
    }
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
        let (id, kind) = (self.handles.new_id(), image.kind);
        let part = Part::run(id, kind, image.bytes, image.checksum);
        let place = self.write_node(part, false, via)?;
        let handle = self
            .handles
            .unrecorded((id, kind), place, image.children, false);
        // The caller that makes an edge to the run looks at its index, and so need not read it.
        if let Some(index) = image.index {
            self.nodes.keep_index(handle.id(), index);
        }
        Ok(handle)
    }

    fn write_node(&self, node: Part, reserved: bool, via: Via) -> Result<Place> {
        let len = node.extent_bytes();
        let extent = if reserved {
            self.table.space().alloc_reserved(len)
        } else {
            self.table.space().alloc(len)
        }?;
        let (place, _) = self.write_at(extent, node, None, via)?;
        Ok(place)
    }

    /// Writes `carrier` at the front of `extent` and `guest` behind it. Returns their places.
    fn write_at(
        &self,
        extent: Extent,
        carrier: Part,
        guest: Option<Part>,
        via: Via,
    ) -> Result<(Place, Option<Place>)> {
        let (kind, place) = (carrier.kind, carrier.place(extent, 0));
        let mut trailers = self.trailer(&carrier, place);
        let mut bytes = carrier.bytes;
        let guest_place = guest.map(|guest| {
            let place = guest.place(extent, place.used_bytes);
            bytes.extend_from_slice(&guest.bytes);
            trailers.splice(..0, self.trailer(&guest, place));
            place
        });
        // Whole blocks: a partial block would make the device read before it writes.
        let end = usize::try_from(extent.len).expect("a node fits memory");
        bytes.resize(end - trailers.len(), 0);
        bytes.extend(trailers);
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
        Ok((place, guest_place))
    }

    fn trailer(&self, node: &Part, place: Place) -> Vec<u8> {
        let trailer = Trailer {
            id: node.id,
            opening: self.opening.number,
            kind: node.kind,
            height: node.height,
            place,
        };
        trailer.encode(self.opening.seed)
    }

    /// Writes a new segment for a checkpoint.
    fn write_segment(&self, image: RunImage) -> Result<Arc<Handle>> {
        let (id, kind) = (self.handles.new_id(), image.kind);
        let part = Part::run(id, kind, image.bytes, image.checksum);
        let place = self.write_node(part, true, Via::Cache)?;
        let node = (id, kind);
        Ok(self.handles.unrecorded(node, place, image.children, false))
    }

    fn image_of(&self, segment: &FreshSegment) -> RunImage {
        let (codec, block_bytes) = (self.shape.codec, self.shape.block_bytes);
        match segment {
            Err(run) => segment_image(run, codec, block_bytes),
            Ok(packed) => packed.image(codec),
        }
    }

    /// Writes a fresh segment or skeleton whose children are all written. Other nodes stay as they
    /// are. A segment without a hole goes to `fragments` and stays fresh.
    pub(crate) fn write_back(&self, handle: &Arc<Handle>, fragments: &mut Fragments) -> Result<()> {
        if let Some(segment) = self.handles.dirty.segment(handle) {
            let image = self.image_of(&segment);
            self.write_back_segment(handle, segment, image, fragments)?;
        } else if let Some(node) = self.handles.dirty.skeleton(handle) {
            let node = node.with_fragments(fragments).map_or(node, Arc::new);
            check_written(&node, None)?;
            let place = self.write_node(Part::skeleton(handle, &node), true, Via::Cache)?;
            self.skeleton_written(handle, node, place);
        }
        Ok(())
    }

    /// Whether a skeleton may lie behind a segment: a fresh one that is short and names no node.
    pub(crate) fn may_carry(&self, segment: &Handle) -> bool {
        let bytes = match self.handles.dirty.segment(segment) {
            Some(Ok(packed)) => packed.stored_bytes_max(),
            Some(Err(run)) if run.range_count() == 0 => run.size_bytes() + RUN_HEADER_BYTES,
            _ => return false,
        };
        bytes as u64 <= SHARED_EXTENT_BYTES
    }

    /// Writes `carrier`, a fresh segment, and `node`, a fresh skeleton that names it and whose other
    /// children are written: in one extent if that is short and takes less, else like
    /// [`WriteBack::write_back`].
    pub(crate) fn write_back_with_guest(
        &self,
        (carrier, node): (&Arc<Handle>, &Arc<Handle>),
        fragments: &mut Fragments,
    ) -> Result<()> {
        if let (Some(segment), Some(skeleton)) = (
            self.handles.dirty.segment(carrier),
            self.handles.dirty.skeleton(node),
        ) {
            let mut image = self.image_of(&segment);
            let skeleton = skeleton
                .with_fragments(fragments)
                .map_or(skeleton, Arc::new);
            check_written(&skeleton, Some(carrier))?;
            let guest = Part::skeleton(node, &skeleton);
            let len = extent_bytes(image.bytes.len());
            let with_guest = extent_bytes(image.bytes.len() + guest.bytes.len() + TRAILER_BYTES);
            // The carrier does not grow: it may live longer than the guest.
            let is_less = with_guest == len && len <= SHARED_EXTENT_BYTES;
            // Where there is no hole, each alone may find one.
            let extent = is_less.then(|| self.table.space().alloc_reserved(len));
            if let Some(Ok(extent)) = extent {
                let bytes = std::mem::take(&mut image.bytes);
                let part = Part::run(carrier.id(), image.kind, bytes, image.checksum);
                let (place, guest) = self.write_at(extent, part, Some(guest), Via::Cache)?;
                self.segment_written(carrier, image, place);
                let guest = guest.expect("it was written with a guest");
                self.skeleton_written(node, skeleton, guest);
                return Ok(());
            }
            self.write_back_segment(carrier, segment, image, fragments)?;
        }
        self.write_back(node, fragments)
    }

    fn write_back_segment(
        &self,
        handle: &Arc<Handle>,
        segment: FreshSegment,
        mut image: RunImage,
        fragments: &mut Fragments,
    ) -> Result<()> {
        let bytes = std::mem::take(&mut image.bytes);
        let part = Part::run(handle.id(), image.kind, bytes, image.checksum);
        let len = part.extent_bytes();
        match self.write_node(part, true, Via::Cache) {
            Ok(place) => self.segment_written(handle, image, place),
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
        Ok(())
    }

    fn segment_written(&self, handle: &Handle, image: RunImage, place: Place) {
        // The next flush measures its pressure.
        if let Some(index) = image.index {
            self.nodes.keep_index(handle.id(), index);
        }
        self.become_written(handle, place, image.children);
    }

    fn skeleton_written(&self, handle: &Handle, node: Arc<Skeleton>, place: Place) {
        let children = node.children().cloned().collect();
        self.nodes.keep_skeleton(handle.id(), node);
        self.become_written(handle, place, children);
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
