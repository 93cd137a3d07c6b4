//! The mount of a volume, with the views of its snapshots and mounts of single ones.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ramet_fs::{Volume, is_view};

use crate::error::{Error, Result};
use crate::mount::connections::Connections;
use crate::mount::options::{MountOptions, Views};
use crate::mount::session::{self, Beside, Mounted};
use crate::mount::snapshots::SnapshotMounts;
use crate::mount::views::{MountedViews, helper, place_outside_of};
use crate::server::control_calls::{self, LiveMount};
use crate::server::server::Server;

/// Mounts `volume` on `dir`, which is usable on return. Threads of this process serve it. Views of
/// snapshots are mounted when a program looks for them, and single snapshots when a process asks.
///
/// # Errors
/// The error of the kernel or of fusermount3.
pub fn mount(volume: Arc<Volume>, dir: &Path, options: &MountOptions) -> Result<Mounted> {
    let connections = Arc::<Connections>::default();
    if is_view(&volume) {
        return session::mount(volume, dir, options, (&connections, |_| {}));
    }
    let helper = helper();
    let views = views_of((&volume, &connections), dir, options, &helper)?;
    let snapshots = Arc::new(SnapshotMounts::new(
        (Arc::clone(&volume), Arc::clone(&connections)),
        helper,
        options.ahead,
    ));
    // The kernel keeps a name for a while that it did not find, so the first lookup must find it.
    let prepare = |server: &Server| {
        if let Some(shown) = views.clone() {
            let is_open = options.views == Views::All;
            let shown = Box::new(move || shown.mounted());
            server.reserved.show(shown, is_open);
        }
        let (serving, told) = (Arc::clone(&snapshots), Arc::clone(&snapshots));
        server
            .controls
            .is_beside(control_calls::Beside::Live(LiveMount {
                serve: Box::new(move |mount, process| serving.serve(mount, process)),
                mounts: Box::new(move || told.told()),
            }));
    };
    let mut mounted = session::mount(volume, dir, options, (&connections, prepare))?;
    let unmounter = mounted.unmounter();
    let (within, top) = (Arc::clone(&snapshots), unmounter.dir().to_owned());
    unmounter.comes_after(Box::new(move || within.unmount_within(&top)));
    if let Some(device) = unmounter.device() {
        if let Some(views) = &views {
            views.lie_outside_of(device);
        }
        snapshots.lives_on(device);
    }
    mounted.show_beside(Beside {
        views_dir: views.as_ref().map(|views| views.dir().to_owned()),
        end: Box::new(move || {
            snapshots.end();
            if let Some(views) = views {
                views.end();
            }
        }),
    });
    Ok(mounted)
}

/// The views that a mount of `volume` on `dir` shows, not mounted yet.
fn views_of(
    (volume, connections): (&Arc<Volume>, &Arc<Connections>),
    dir: &Path,
    options: &MountOptions,
    helper: &Path,
) -> Result<Option<Arc<MountedViews>>> {
    if options.views == Views::None {
        return Ok(None);
    }
    let Some(place) = place_outside_of(dir) else {
        tracing::warn!("no directory for views of snapshots outside of the volume");
        return Ok(None);
    };
    let options = MountOptions {
        helper: PathBuf::from(helper),
        ..options.clone()
    };
    let of = (Arc::clone(volume), Arc::clone(connections));
    let views = MountedViews::new(of, &options, place);
    let views = views.map_err(|source| Error::Mount {
        dir: dir.display().to_string(),
        source,
    })?;
    Ok(Some(Arc::new(views)))
}
