//! The links of a task.

use indexmap::IndexMap;
use rustc_hash::FxBuildHasher;
use sempa_proto::Tid;
use sempa_proto::link::Link;

/// The links of a task by peer.
pub(super) type Links = IndexMap<Tid, Link, FxBuildHasher>;

/// Returns the link with a peer. `index` is the index at which the link was found last; any number
/// if the link was not searched for yet. If the link is there, it is found without a search.
#[inline]
pub(super) fn link_at<'a>(
    links: &'a mut Links,
    index: &mut usize,
    peer: Tid,
) -> Option<&'a mut Link> {
    if links.get_index(*index).is_none_or(|(tid, _)| *tid != peer) {
        *index = links.get_index_of(&peer)?;
    }
    links.get_index_mut(*index).map(|(_, link)| link)
}
