//! What comes with a listing, where the kernel leaves that to the server.

use crate::glances::FirstEntryPolicy;
use crate::habits::ReaddirplusPolicy;

/// What programs get of a directory, where the kernel leaves that to the server.
#[derive(Default)]
pub(crate) struct ListingPolicies {
    pub(crate) attributes: ReaddirplusPolicy,
    pub(crate) first_entry: FirstEntryPolicy,
}
