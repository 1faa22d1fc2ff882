//! Requests to the group server and their replies.
//!
//! A request is a message in the context of groups; its tag is the operation, its body the
//! arguments. The reply has the tag of the request. The reply to a barrier or a freeze is sent when
//! enough members have requested it.
//!
//! PVM's server adds the members of a static group to its replies, and libraries keep them. This
//! server reports every group as a group that may change, so libraries request what they need.

use crate::dump::members_by_host;
use libpvm::Body;
use pvmd_machine::groups::{GroupAnswer, Groups};
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::group::{GroupInfo, GroupReply, GroupRequest, GroupState, GroupWait};
use sempa_proto::{PvmError, PvmResult, RequestId, Tid};
use std::collections::BTreeMap;

/// Tag of the daemon's message that a member has ended.
pub const TAG_MEMBER_ENDED: i32 = 11;
/// State of a group that may change, in a reply.
const STATE_DYNAMIC: i32 = 2;
/// Stands for a free instance, and for the coordinator of a host without members.
const NO_TID: i32 = -1;

/// Operations, by the tags of their requests.
mod tag {
    pub(super) const DIE: i32 = 0;
    pub(super) const JOIN: i32 = 1;
    pub(super) const LEAVE: i32 = 2;
    pub(super) const BARRIER: i32 = 3;
    pub(super) const MEMBERS: i32 = 4;
    pub(super) const INSTANCE: i32 = 5;
    pub(super) const MEMBER: i32 = 6;
    pub(super) const SIZE: i32 = 7;
    pub(super) const DUMP: i32 = 9;
    pub(super) const LIST: i32 = 10;
    /// The members of a group without free instances.
    pub(super) const ALL_MEMBERS: i32 = 12;
    pub(super) const FREEZE: i32 = 13;
    pub(super) const HOST: i32 = 14;
    pub(super) const HOSTS: i32 = 15;
}

/// An action that the caller of [`Server::handle`] must perform.
#[derive(Debug)]
pub enum Action {
    /// Send a message with this tag to this task.
    Reply { to: Tid, tag: i32, body: Body },
    /// Request a message with the tag [`TAG_MEMBER_ENDED`] for the end of this task.
    WatchTask(Tid),
    /// Print all groups to standard error.
    Dump,
    /// Print all groups to standard error, and end.
    End,
}

/// Groups, and the requests of other tasks that wait for each other.
#[derive(Debug, Default)]
pub struct Server {
    groups: Groups,
    /// Tags of the requests that have no reply yet.
    open_requests: BTreeMap<RequestId, i32>,
    last_request: u64,
}

impl Server {
    /// Returns all groups, sorted by name.
    pub fn groups(&mut self) -> Vec<GroupInfo> {
        match self.request_now(Tid::NONE, GroupRequest::List) {
            Ok(GroupReply::Groups(groups)) => groups,
            _ => Vec::new(),
        }
    }

    /// Handles a message. `source` is its sender. A message that cannot be decoded, and one with
    /// an unknown tag, has no effect.
    pub fn handle(&mut self, source: Tid, tag: i32, body: &mut Unpacker) -> Vec<Action> {
        self.handle_message(source, tag, body).unwrap_or_default()
    }

    fn handle_message(
        &mut self,
        source: Tid,
        tag: i32,
        body: &mut Unpacker,
    ) -> PvmResult<Vec<Action>> {
        let mut actions = Vec::new();
        let group = |body: &mut Unpacker| body.read_str().map(|name| name.to_vec());
        let request = match tag {
            tag::DIE => return Ok(vec![Action::End]),
            tag::DUMP => return Ok(vec![Action::Dump]),
            TAG_MEMBER_ENDED if source.is_daemon() => {
                self.groups
                    .remove_ended_task(Tid::from_raw(body.read_int()?));
                return Ok(self.take_replies());
            }
            tag::LIST => {
                let body = list_body(&self.groups());
                return Ok(vec![Action::Reply {
                    to: source,
                    tag,
                    body,
                }]);
            }
            tag::HOST | tag::HOSTS => {
                let group = group(body)?;
                let host = (tag == tag::HOST).then(|| body.read_int()).transpose()?;
                let body = self.hosts_body(&group, host);
                return Ok(vec![Action::Reply {
                    to: source,
                    tag,
                    body,
                }]);
            }
            tag::JOIN => {
                actions.push(Action::WatchTask(source));
                GroupRequest::Join {
                    group: group(body)?,
                }
            }
            tag::LEAVE => GroupRequest::Leave {
                group: group(body)?,
            },
            tag::BARRIER => GroupRequest::Barrier {
                group: group(body)?,
                required_members: body.read_int()?,
            },
            tag::FREEZE => GroupRequest::Freeze {
                group: group(body)?,
                required_members: body.read_int()?,
            },
            tag::MEMBERS | tag::ALL_MEMBERS => {
                let group = group(body)?;
                let body = self.members_body(group, tag == tag::ALL_MEMBERS);
                return Ok(vec![Action::Reply {
                    to: source,
                    tag,
                    body,
                }]);
            }
            tag::INSTANCE => GroupRequest::Instance {
                group: group(body)?,
                tid: Tid::from_raw(body.read_int()?),
            },
            tag::MEMBER => GroupRequest::Member {
                group: group(body)?,
                instance: body.read_int()?,
            },
            tag::SIZE => GroupRequest::Size {
                group: group(body)?,
            },
            _ => return Ok(actions),
        };
        let id = self.new_request();
        self.open_requests.insert(id, tag);
        self.groups.handle_request(source, id, request);
        actions.extend(self.take_replies());
        Ok(actions)
    }

    fn new_request(&mut self) -> RequestId {
        self.last_request += 1;
        RequestId(self.last_request)
    }

    /// Returns the messages for all replies that are due.
    fn take_replies(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        while let Some(GroupAnswer { tid, id, result }) = self.groups.next_reply() {
            let Some(tag) = self.open_requests.remove(&id) else {
                continue;
            };
            let number = match result {
                Ok(GroupReply::Number(number)) => number,
                Ok(_) => continue,
                Err((error, _)) => error.code(),
            };
            let has_state = !matches!(tag, tag::JOIN | tag::LEAVE | tag::BARRIER);
            let mut body = Packer::new(Encoding::Xdr);
            body.pack_int(number);
            if has_state {
                body.pack_int(STATE_DYNAMIC);
            }
            actions.push(Action::Reply {
                to: tid,
                tag,
                body: body.into(),
            });
        }
        actions
    }

    /// Makes a request that is answered at once.
    fn request_now(&mut self, tid: Tid, request: GroupRequest) -> PvmResult<GroupReply> {
        let id = self.new_request();
        self.groups.handle_request(tid, id, request);
        match self.groups.next_reply() {
            Some(answer) if answer.id == id => answer.result.map_err(|(error, _)| error),
            _ => Err(PvmError::SysErr),
        }
    }

    fn group_info(&mut self, name: &[u8]) -> Option<GroupInfo> {
        self.groups().into_iter().find(|group| group.name == name)
    }

    /// Returns the reply with the members of a group, or with an error code.
    fn members_body(&mut self, group: Vec<u8>, needs_all_instances: bool) -> Body {
        let members = match self.request_now(
            Tid::NONE,
            GroupRequest::Members {
                group: group.clone(),
            },
        ) {
            Ok(GroupReply::Members(members)) => Ok(members),
            Ok(_) => Err(PvmError::SysErr),
            Err(error) => Err(error),
        };
        let is_broken = self
            .group_info(&group)
            .is_some_and(|group| group.state == GroupState::Broken);
        let members = members.and_then(|members| {
            if is_broken {
                Err(PvmError::NoGroup)
            } else if needs_all_instances && members.contains(&Tid::NONE) {
                Err(PvmError::NoInst)
            } else {
                Ok(members)
            }
        });
        let mut body = Packer::new(Encoding::Xdr);
        match members {
            Err(error) => {
                body.pack_int(error.code());
            }
            Ok(mut members) => {
                members.retain(|tid| *tid != Tid::NONE);
                body.pack_int(members.len() as i32);
                body.pack_items(members.iter().map(|tid| tid.raw()));
                body.pack_int(STATE_DYNAMIC);
            }
        }
        body.into()
    }

    /// Returns the reply about all hosts with members of a group, or about the host `host`.
    fn hosts_body(&mut self, group: &[u8], host: Option<i32>) -> Body {
        let hosts = self
            .group_info(group)
            .map(|group| members_by_host(&group))
            .unwrap_or_default();
        let mut body = Packer::new(Encoding::Xdr);
        match host {
            Some(host) => {
                let found = hosts.get(&Tid::from_raw(host));
                body.pack_int(found.map_or(0, |_| hosts.len() as i32));
                body.pack_int(found.map_or(0, |(_, count)| *count));
                body.pack_int(found.map_or(NO_TID, |(coordinator, _)| coordinator.raw()));
            }
            None => {
                body.pack_int(hosts.len() as i32);
                body.pack_items(hosts.values().map(|(_, count)| *count));
                body.pack_items(hosts.values().map(|(coordinator, _)| coordinator.raw()));
            }
        }
        body.pack_int(STATE_DYNAMIC);
        body.into()
    }
}

/// Returns the reply with all groups.
fn list_body(groups: &[GroupInfo]) -> Body {
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_int(groups.len() as i32);
    for group in groups {
        let waiting: &[Tid] = match &group.barrier {
            Some(GroupWait {
                waiting_members, ..
            }) => waiting_members,
            None => &[],
        };
        let barrier_count = group
            .barrier
            .as_ref()
            .map_or(-1, |wait| wait.required_members as i32);
        // The length includes the NUL.
        body.pack_int(group.name.len() as i32 + 1);
        body.pack_str(&group.name);
        body.pack_int(group.member_count() as i32);
        body.pack_int(group.members.len() as i32);
        body.pack_int(barrier_count);
        body.pack_int(waiting.len() as i32);
        let member = |tid: &Tid| {
            if *tid == Tid::NONE { NO_TID } else { tid.raw() }
        };
        body.pack_items(group.members.iter().map(member));
        body.pack_items(waiting.iter().map(|tid| tid.raw()));
    }
    body.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Tid = Tid::from_raw(0x40001);
    const B: Tid = Tid::from_raw(0x40002);
    const C: Tid = Tid::from_raw(0x80001);
    const DAEMON: Tid = Tid::from_raw(0x8000_0000_u32 as i32);

    fn request(group: &str, numbers: &[i32]) -> Unpacker {
        let mut packer = Packer::new(Encoding::Xdr);
        packer.pack_str(group.as_bytes());
        packer.pack_items(numbers.iter().copied());
        Unpacker::new_xdr(packer.finish())
    }

    /// Sends a request to the server. Returns the replies: receiver, tag, integers.
    fn replies(
        server: &mut Server,
        source: Tid,
        tag: i32,
        mut body: Unpacker,
    ) -> Vec<(Tid, i32, Vec<i32>)> {
        let reply = |action| match action {
            Action::Reply { to, tag, body } => {
                let count = (body.bytes.len() / 4) as i32;
                let integers = Unpacker::new_xdr(body.bytes).read_ints(count);
                Some((to, tag, integers.expect("integers")))
            }
            _ => None,
        };
        server
            .handle(source, tag, &mut body)
            .into_iter()
            .filter_map(reply)
            .collect()
    }

    fn server_with_members() -> Server {
        let mut server = Server::default();
        for (instance, tid) in [A, B, C].into_iter().enumerate() {
            let joined = replies(&mut server, tid, tag::JOIN, request("g", &[]));
            assert_eq!(joined, [(tid, tag::JOIN, vec![instance as i32])]);
        }
        server
    }

    #[test]
    fn join_watches_the_member() {
        let mut server = Server::default();
        let actions = server.handle(A, tag::JOIN, &mut request("g", &[]));
        assert!(matches!(actions[0], Action::WatchTask(tid) if tid == A));
        let ended = Packer::new(Encoding::Xdr).pack_int(A.raw()).clone();
        let ended = |source| {
            let mut server = server_with_members();
            let body = Unpacker::new_xdr(ended.clone().finish());
            replies(&mut server, source, TAG_MEMBER_ENDED, body);
            server.groups()[0].member_count()
        };
        assert_eq!(ended(DAEMON), 2);
        assert_eq!(ended(B), 3, "only the daemon reports an end");
    }

    #[test]
    fn requests_have_replies_with_state() {
        let mut server = server_with_members();
        for (tag, body, expected) in [
            (tag::SIZE, request("g", &[]), vec![3, 2]),
            (tag::INSTANCE, request("g", &[C.raw()]), vec![2, 2]),
            (tag::MEMBER, request("g", &[1]), vec![B.raw(), 2]),
            (tag::MEMBER, request("g", &[7]), vec![-21, 2]),
            (tag::SIZE, request("other", &[]), vec![-19, 2]),
            (
                tag::MEMBERS,
                request("g", &[]),
                vec![3, A.raw(), B.raw(), C.raw(), 2],
            ),
            (tag::MEMBERS, request("other", &[]), vec![-19]),
            (tag::HOST, request("g", &[0x40000]), vec![2, 2, A.raw(), 2]),
            (tag::HOST, request("g", &[0xc0000]), vec![0, 0, -1, 2]),
            (
                tag::HOSTS,
                request("g", &[]),
                vec![2, 2, 1, A.raw(), C.raw(), 2],
            ),
            (tag::HOSTS, request("other", &[]), vec![0, 2]),
        ] {
            assert_eq!(replies(&mut server, B, tag, body), [(B, tag, expected)]);
        }
    }

    #[test]
    fn free_instances_are_refused_where_all_are_needed() {
        let mut server = server_with_members();
        let left = replies(&mut server, B, tag::LEAVE, request("g", &[]));
        assert_eq!(left, [(B, tag::LEAVE, vec![0])]);
        let all = replies(&mut server, A, tag::ALL_MEMBERS, request("g", &[]));
        assert_eq!(all, [(A, tag::ALL_MEMBERS, vec![-21])]);
        let some = replies(&mut server, A, tag::MEMBERS, request("g", &[]));
        assert_eq!(some, [(A, tag::MEMBERS, vec![2, A.raw(), C.raw(), 2])]);
    }

    #[test]
    fn barrier_and_freeze_reply_to_all_at_the_end() {
        let mut server = server_with_members();
        assert_eq!(
            replies(&mut server, A, tag::BARRIER, request("g", &[2])),
            []
        );
        let mut done = replies(&mut server, B, tag::BARRIER, request("g", &[2]));
        done.sort();
        assert_eq!(
            done,
            [(A, tag::BARRIER, vec![0]), (B, tag::BARRIER, vec![0])]
        );
        for tid in [A, B] {
            assert_eq!(
                replies(&mut server, tid, tag::FREEZE, request("g", &[3])),
                []
            );
        }
        let done = replies(&mut server, C, tag::FREEZE, request("g", &[3]));
        assert_eq!(done.len(), 3);
        assert!(done.iter().all(|(_, _, integers)| *integers == [3, 2]));
        let late = replies(
            &mut server,
            Tid::from_raw(0x80002),
            tag::JOIN,
            request("g", &[]),
        );
        assert_eq!(late[0].2, [-20]);
    }

    #[test]
    fn messages_that_cannot_be_decoded_have_no_effect() {
        let mut server = server_with_members();
        for tag in -1..20 {
            let mut empty = Unpacker::new_xdr(Body::empty().bytes);
            let actions = server.handle(A, tag, &mut empty);
            let is_harmless = |action: &Action| match action {
                Action::Reply { tag, .. } => *tag == tag::LIST,
                Action::Dump => tag == tag::DUMP,
                Action::End => tag == tag::DIE,
                Action::WatchTask(_) => false,
            };
            assert!(actions.iter().all(is_harmless), "{tag}: {actions:?}");
        }
        assert_eq!(server.groups()[0].member_count(), 3);
    }

    #[test]
    fn list_has_pvms_layout() {
        let mut server = server_with_members();
        replies(&mut server, B, tag::LEAVE, request("g", &[]));
        replies(&mut server, C, tag::BARRIER, request("g", &[2]));
        let list = list_body(&server.groups());
        let mut list = Unpacker::new_xdr(list.bytes);
        assert_eq!(list.read_ints(2).expect("integers"), [1, 2]);
        assert_eq!(list.read_string().expect("a name"), "g");
        assert_eq!(list.read_ints(4).expect("integers"), [2, 3, 2, 1]);
        assert_eq!(
            list.read_ints(4).expect("integers"),
            [A.raw(), -1, C.raw(), C.raw()]
        );
        assert_eq!(list.remaining(), 0);
    }

    #[test]
    fn dump_names_members_and_hosts() {
        let mut server = server_with_members();
        replies(&mut server, C, tag::BARRIER, request("g", &[2]));
        let text = crate::dump::text("DUMP", Tid::from_raw(0x40009), &server.groups());
        for part in [
            "DUMP 0x40009, 1 groups:\n",
            "group: g  size: 3 barrier_count: 2 barrier_reached 1\n sgroup_count: -1 sgroup_reached 0\n",
            "(0,  0x40001) (1,  0x40002) (2,  0x80001) \n",
            "tids waiting on barrier:\n0x80001  \n",
            "host 40000 - 2 procs, 40001 coord \nhost 80000 - 1 procs, 80001 coord \n",
        ] {
            assert!(text.contains(part), "{part}\nin\n{text}");
        }
    }
}
