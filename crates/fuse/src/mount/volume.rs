//! The mount of a volume, with the views of its snapshots.

use std::path::Path;
use std::sync::Arc;

use ramet_fs::{Volume, is_view};

use crate::error::{Error, Result};
use crate::mount::options::{MountOptions, Views};
use crate::mount::session::{self, Beside, Mounted};
use crate::mount::views::{MountedViews, helper, place_outside_of};

/// Mounts `volume` on `dir`, which is usable on return. Threads of this process serve it. Views of
/// snapshots are mounted when a program looks for them.
///
/// # Errors
/// The error of the kernel or of fusermount3.
pub fn mount(volume: Arc<Volume>, dir: &Path, options: &MountOptions) -> Result<Mounted> {
    let Some(views) = views_of(&volume, dir, options)? else {
        return session::mount(volume, dir, options, |_| {});
    };
    // The kernel keeps a name for a while that it did not find, so the first lookup must find it.
    let shown = Arc::clone(&views);
    let mut mounted = session::mount(volume, dir, options, |server| {
        let is_open = options.views == Views::All;
        let shown = Box::new(move || shown.mounted());
        server.reserved.show(shown, is_open);
    })?;
    if let Some(device) = mounted.unmounter().device() {
        views.lie_outside_of(device);
    }
    mounted.show_beside(Beside {
        dir: views.dir().to_owned(),
        end: Box::new(move || views.end()),
    });
    Ok(mounted)
}

/// The views that a mount of `volume` on `dir` shows, not mounted yet.
fn views_of(
    volume: &Arc<Volume>,
    dir: &Path,
    options: &MountOptions,
) -> Result<Option<Arc<MountedViews>>> {
    if is_view(volume) || options.views == Views::None {
        return Ok(None);
    }
    let Some(place) = place_outside_of(dir) else {
        tracing::warn!("no directory for views of snapshots outside of the volume");
        return Ok(None);
    };
    let options = MountOptions {
        helper: helper(),
        ..options.clone()
    };
    let views = MountedViews::new(Arc::clone(volume), &options, place);
    let views = views.map_err(|source| Error::Mount {
        dir: dir.display().to_string(),
        source,
    })?;
    Ok(Some(Arc::new(views)))
}
