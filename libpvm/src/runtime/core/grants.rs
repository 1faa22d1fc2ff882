//! A grant: where the next tasks of a request go that the resource manager has answered already, so that a program which spawns
//! again and again need not ask each time. It holds for requests that are alike, until the resource manager says something else or a
//! while has passed.

use sempa_proto::sm::{GRANT_COUNT_MAX, Grant, unpack_grant};
use sempa_proto::task::{GrantOf, SpawnRequest};
use sempa_proto::{Message, Micros, Tid};

/// The request that was asked last, and what the resource manager has said of others like it.
#[derive(Debug, Default)]
pub(crate) struct Grants(Option<Asked>);

#[derive(Debug)]
struct Asked {
    rm: Tid,
    wid: i32,
    like: SpawnRequest,
    /// When it was asked, or places were taken last: a grant holds for a while from then on.
    last: Micros,
    grant: Option<Grant>,
}

impl Grants {
    /// A resource manager is about to be asked.
    pub(crate) fn asks(&mut self, now: Micros, rm: Tid, wid: i32, request: &SpawnRequest) {
        let like = SpawnRequest {
            args: Vec::new(),
            ..request.clone()
        };
        let few = request.count as usize <= GRANT_COUNT_MAX;
        self.0 = few.then_some(Asked {
            rm,
            wid,
            like,
            last: now,
            grant: None,
        });
    }

    /// A resource manager says where the next tasks go.
    pub(super) fn hear(&mut self, message: Message) {
        let asked = self
            .0
            .as_mut()
            .filter(|asked| (asked.rm, asked.wid) == (message.src, message.wid));
        if let (Some(asked), Ok(grant)) = (asked, unpack_grant(message.body)) {
            asked.grant = Some(grant);
        }
    }

    /// Takes the next places for such a request.
    pub(crate) fn take(&mut self, now: Micros, request: &SpawnRequest) -> Option<GrantOf> {
        let asked = self
            .0
            .as_mut()
            .filter(|asked| asked.like.is_like(request))?;
        let grant = asked
            .grant
            .as_mut()
            .filter(|grant| now.since(asked.last) < grant.span)?;
        let count = request.count as usize;
        let hosts = (grant.hosts.len() >= count).then(|| grant.hosts.drain(..count).collect())?;
        asked.last = now;
        Some(GrantOf {
            rm: asked.rm,
            wid: asked.wid,
            hosts,
        })
    }

    /// What was said does not hold any more.
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }
}
