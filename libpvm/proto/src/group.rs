//! Groups: what a task asks of the group service of the virtual machine, which the master's daemon keeps.

use crate::error::PvmError;
use crate::ids::Tid;
use serde::{Deserialize, Serialize};

/// Barrier count that stands for all members of the moment.
pub const ALL_MEMBERS: i32 = -1;

/// What a task asks of the group service. Names are bytes as the program gives them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupRequest {
    /// Become a member under the lowest free instance number; an unknown name founds the group. → [`GroupReply::Number`]
    Join {
        /// The group.
        group: Vec<u8>,
    },
    /// Be a member no longer. → [`GroupReply::Number`]
    Leave {
        /// The group.
        group: Vec<u8>,
    },
    /// Leave all groups: the task is about to leave the virtual machine. → [`GroupReply::Number`]
    LeaveAll,
    /// Wait until so many members wait. → [`GroupReply::Number`] when they do
    Barrier {
        /// The group.
        group: Vec<u8>,
        /// How many; [`ALL_MEMBERS`]: as many as there are now.
        count: i32,
    },
    /// Wait until so many members ask for this; then nobody joins any more. → [`GroupReply::Number`]
    Freeze {
        /// The group.
        group: Vec<u8>,
        /// How many.
        count: i32,
    },
    /// Instance number of a task. → [`GroupReply::Number`]
    Instance {
        /// The group.
        group: Vec<u8>,
        /// The task.
        tid: Tid,
    },
    /// Task of an instance number. → [`GroupReply::Number`]
    Member {
        /// The group.
        group: Vec<u8>,
        /// The number.
        instance: i32,
    },
    /// Number of members. → [`GroupReply::Number`]
    Size {
        /// The group.
        group: Vec<u8>,
    },
    /// All members by instance. → [`GroupReply::Members`]
    Members {
        /// The group.
        group: Vec<u8>,
    },
    /// Everything about all groups. → [`GroupReply::Groups`]
    List,
}

/// What the group service answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupReply {
    /// An instance, a tid, a size, or 0 for done.
    Number(i32),
    /// Members by instance; [`Tid::NONE`] where a number is free.
    Members(Vec<Tid>),
    /// All groups by name.
    Groups(Vec<GroupInfo>),
}

/// How a group stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum GroupState {
    /// Tasks join and leave.
    #[default]
    Dynamic,
    /// Frozen: nobody joins.
    Static,
    /// Frozen, and a member is missing since.
    Broken,
}

/// A meeting that members wait for: a barrier or a freeze.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meeting {
    /// How many have to come.
    pub wanted: u32,
    /// Who waits.
    pub waiting: Vec<Tid>,
}

/// One group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupInfo {
    /// Its name.
    pub name: Vec<u8>,
    /// How it stands.
    pub state: GroupState,
    /// Members by instance; [`Tid::NONE`] where a number is free.
    pub members: Vec<Tid>,
    /// The open barrier.
    pub barrier: Option<Meeting>,
    /// The open freeze.
    pub freeze: Option<Meeting>,
}

impl GroupInfo {
    /// Number of members.
    pub fn size(&self) -> usize {
        self.members.iter().filter(|tid| **tid != Tid::NONE).count()
    }
}

/// The calls of `sempa_group_request`, by which the group library reaches the service through the library of the task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum GroupCall {
    /// [`GroupRequest::Join`].
    Join = 1,
    /// [`GroupRequest::Leave`].
    Leave = 2,
    /// [`GroupRequest::Barrier`]; the number is the count.
    Barrier = 3,
    /// [`GroupRequest::Freeze`]; the number is the count.
    Freeze = 4,
    /// [`GroupRequest::Instance`]; the number is the tid.
    Instance = 5,
    /// [`GroupRequest::Member`]; the number is the instance.
    Member = 6,
    /// [`GroupRequest::Size`].
    Size = 7,
    /// [`GroupRequest::Members`]; the list has one tid per instance.
    Members = 8,
    /// [`GroupRequest::List`]; the list is what [`list_words`] makes.
    List = 9,
}

impl GroupCall {
    /// All calls.
    pub const ALL: [GroupCall; 9] = [
        GroupCall::Join,
        GroupCall::Leave,
        GroupCall::Barrier,
        GroupCall::Freeze,
        GroupCall::Instance,
        GroupCall::Member,
        GroupCall::Size,
        GroupCall::Members,
        GroupCall::List,
    ];

    /// The request for this call.
    pub fn request(self, group: Vec<u8>, number: i32) -> GroupRequest {
        match self {
            GroupCall::Join => GroupRequest::Join { group },
            GroupCall::Leave => GroupRequest::Leave { group },
            GroupCall::Barrier => GroupRequest::Barrier {
                group,
                count: number,
            },
            GroupCall::Freeze => GroupRequest::Freeze {
                group,
                count: number,
            },
            GroupCall::Instance => GroupRequest::Instance {
                group,
                tid: Tid::from_raw(number),
            },
            GroupCall::Member => GroupRequest::Member {
                group,
                instance: number,
            },
            GroupCall::Size => GroupRequest::Size { group },
            GroupCall::Members => GroupRequest::Members { group },
            GroupCall::List => GroupRequest::List,
        }
    }
}

impl TryFrom<i32> for GroupCall {
    type Error = PvmError;

    fn try_from(code: i32) -> Result<GroupCall, PvmError> {
        GroupCall::ALL
            .into_iter()
            .find(|call| *call as i32 == code)
            .ok_or(PvmError::BadParam)
    }
}

/// All groups as words for a C caller, in the order of PVM's own list of groups. Per group: length of the name, its bytes
/// one by one, number of members, length of the member list, how many the barrier wants (−1 without one), how many wait;
/// then the member list (−1 where a number is free) and who waits.
pub fn list_words(groups: &[GroupInfo]) -> Vec<i32> {
    let mut words = vec![groups.len() as i32];
    for group in groups {
        words.push(group.name.len() as i32);
        words.extend(group.name.iter().map(|byte| i32::from(*byte)));
        let waiting: &[Tid] = group.barrier.as_ref().map_or(&[], |b| &b.waiting);
        let wanted = group.barrier.as_ref().map_or(-1, |b| b.wanted as i32);
        words.extend([
            group.size() as i32,
            group.members.len() as i32,
            wanted,
            waiting.len() as i32,
        ]);
        words.extend(
            group
                .members
                .iter()
                .map(|tid| if *tid == Tid::NONE { -1 } else { tid.raw() }),
        );
        words.extend(waiting.iter().map(|tid| tid.raw()));
    }
    words
}

/// Calls of the group library that a tracer can be told of, with what PVM records of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum GroupEvent {
    /// `pvm_joingroup`.
    Join,
    /// `pvm_lvgroup`.
    Leave,
    /// `pvm_barrier`; the argument is the count.
    Barrier,
    /// `pvm_bcast`; the argument is the tag.
    Bcast,
    /// `pvm_getinst`; the argument is the tid.
    Instance,
    /// `pvm_gettid`; the argument is the instance.
    Member,
    /// `pvm_gsize`.
    Size,
    /// `pvm_gather`; the argument is the tag.
    Gather,
    /// `pvm_scatter`; the argument is the tag.
    Scatter,
    /// `pvm_reduce`; the argument is the tag.
    Reduce,
}

impl GroupEvent {
    /// All events in their order.
    pub const ALL: [GroupEvent; 10] = [
        GroupEvent::Join,
        GroupEvent::Leave,
        GroupEvent::Barrier,
        GroupEvent::Bcast,
        GroupEvent::Instance,
        GroupEvent::Member,
        GroupEvent::Size,
        GroupEvent::Gather,
        GroupEvent::Scatter,
        GroupEvent::Reduce,
    ];

    /// Name of the event, name of the item for the argument, name of the item for the answer.
    pub fn names(self) -> (&'static str, Option<&'static str>, &'static str) {
        match self {
            GroupEvent::Join => ("joingroup", None, "CC"),
            GroupEvent::Leave => ("lvgroup", None, "CC"),
            GroupEvent::Barrier => ("barrier", Some("GBC"), "CC"),
            GroupEvent::Bcast => ("bcast", Some("MC"), "CC"),
            GroupEvent::Instance => ("getinst", Some("GT"), "GI"),
            GroupEvent::Member => ("gettid", Some("GI"), "GT"),
            GroupEvent::Size => ("gsize", None, "GS"),
            GroupEvent::Gather => ("gather", Some("MC"), "CC"),
            GroupEvent::Scatter => ("scatter", Some("MC"), "CC"),
            GroupEvent::Reduce => ("reduce", Some("MC"), "CC"),
        }
    }
}

impl TryFrom<i32> for GroupEvent {
    type Error = PvmError;

    fn try_from(code: i32) -> Result<GroupEvent, PvmError> {
        GroupEvent::ALL
            .into_iter()
            .find(|event| *event as i32 == code)
            .ok_or(PvmError::BadParam)
    }
}
