//! Task groups in the Rust API.

use crate::error::Error;
use crate::vm::Vm;
use sempa_proto::Tid;
use sempa_proto::group::{ALL_MEMBERS, GroupInfo, GroupReply, GroupRequest};
use sempa_proto::task::Reply;

impl Vm {
    /// Joins a group and returns this task's instance number, the lowest free number. The first
    /// member creates the group.
    ///
    /// # Errors
    /// `DupGroup` if this task is a member already, `NotInGroup` if the group is frozen, `OutOfRes`
    /// at a limit of the group service.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let vm = libpvm::Vm::enroll()?;
    /// let instance = vm.join_group("workers")?;
    /// vm.barrier("workers", Some(4))?;
    /// println!("all four are here; I am number {instance}");
    /// # Ok(())
    /// # }
    /// ```
    pub fn join_group(&self, group: &str) -> Result<i32, Error> {
        self.request_group_number(
            "joining a group",
            GroupRequest::Join {
                group: group.into(),
            },
        )
    }

    /// Ends this task's membership in a group.
    ///
    /// # Errors
    /// `NoGroup`, `NotInGroup`.
    pub fn leave_group(&self, group: &str) -> Result<(), Error> {
        self.request_group_number(
            "leaving a group",
            GroupRequest::Leave {
                group: group.into(),
            },
        )
        .map(|_| ())
    }

    /// Blocks until `count` members have called this method. `None` stands for the number of
    /// current members.
    ///
    /// # Errors
    /// `NoGroup` if a member ended during the wait and fewer members than `count` remain,
    /// `NotInGroup`, `Mismatch` if other members wait with a different count.
    pub fn barrier(&self, group: &str, count: Option<u32>) -> Result<(), Error> {
        let count = count.map_or(ALL_MEMBERS, |count| {
            i32::try_from(count).unwrap_or(i32::MAX)
        });
        self.request_group_number(
            "waiting at a barrier",
            GroupRequest::Barrier {
                group: group.into(),
                required_members: count,
            },
        )
        .map(|_| ())
    }

    /// Returns the tids of the members; the index is the instance number. `None` in the list stands
    /// for a free instance number.
    ///
    /// # Errors
    /// `NoGroup`.
    pub fn group_members(&self, group: &str) -> Result<Vec<Option<Tid>>, Error> {
        let operation = "listing a group";
        match self.runtime().group_request_and_wait(
            GroupRequest::Members {
                group: group.into(),
            },
            None,
        ) {
            Reply::Group(GroupReply::Members(tids)) => Ok(tids
                .into_iter()
                .map(|tid| Some(tid).filter(|tid| *tid != Tid::NONE))
                .collect()),
            other => Err(Error::from_reply(operation, other)),
        }
    }

    /// Returns a description of every group.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn groups(&self) -> Result<Vec<GroupInfo>, Error> {
        match self
            .runtime()
            .group_request_and_wait(GroupRequest::List, None)
        {
            Reply::Group(GroupReply::Groups(groups)) => Ok(groups),
            other => Err(Error::from_reply("listing the groups", other)),
        }
    }

    fn request_group_number(&self, operation: &str, request: GroupRequest) -> Result<i32, Error> {
        match self.runtime().group_request_and_wait(request, None) {
            Reply::Group(GroupReply::Number(number)) => Ok(number),
            other => Err(Error::from_reply(operation, other)),
        }
    }
}
