//! Shares the number of guests that the owner permits among the virtual machines of a machine.
//! Pure.

/// The limits of one virtual machine, and what the others have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedLimit {
    /// Number of guests that the owner and the administrator permit to all users together; `None`
    /// if they state none.
    pub of_machine: Option<u32>,
    /// Number of guests that the policy for this virtual machine permits. The user of the virtual
    /// machine may have stated a smaller one, or a greater one as an owner.
    pub of_vm: Option<u32>,
}

impl SharedLimit {
    /// Returns the number of guests that all virtual machines may have as far as this one is
    /// concerned; `None` if there is no limit. An owner's own statement for an own virtual machine
    /// may exceed what others may have.
    pub fn total(self) -> Option<u32> {
        let of_machine = self.of_machine?;
        self.of_vm.map(|of_vm| of_vm.max(of_machine))
    }

    /// Returns the number of guests that this virtual machine may have while the others have
    /// `others`; `None` if there is no limit.
    pub fn remaining(self, others: u64) -> Option<u32> {
        let of_vm = self.of_vm?;
        let Some(total) = self.total() else {
            return Some(of_vm);
        };
        let others = u32::try_from(others).unwrap_or(u32::MAX);
        Some(of_vm.min(total.saturating_sub(others)))
    }

    /// Returns the number of guests of all virtual machines above which the start of any guest is
    /// refused; `None` if some virtual machine has no limit. `limits` are those
    /// of all virtual machines.
    pub fn cap(of_machine: Option<u32>, limits: impl IntoIterator<Item = Self>) -> Option<u32> {
        let totals = limits.into_iter().map(Self::total);
        totals
            .chain([of_machine])
            .try_fold(0, |cap, total| Some(total?.max(cap)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limit(of_machine: Option<u32>, of_vm: Option<u32>) -> SharedLimit {
        SharedLimit { of_machine, of_vm }
    }

    /// The guests of all virtual machines count against the owner's limit, and only those of the
    /// own one against a limit that the user has stated for it.
    #[test]
    fn guests_of_others_count_against_the_owners_limit() {
        assert_eq!(limit(Some(2), Some(2)).remaining(0), Some(2));
        assert_eq!(limit(Some(2), Some(2)).remaining(1), Some(1));
        assert_eq!(limit(Some(2), Some(2)).remaining(5), Some(0));
        assert_eq!(limit(None, Some(1)).remaining(5), Some(1), "the user's own");
        assert_eq!(limit(Some(4), Some(1)).remaining(2), Some(1));
        assert_eq!(limit(None, None).remaining(5), None);
    }

    /// An owner may permit more guests of an own virtual machine than of others.
    #[test]
    fn owner_may_permit_more_for_an_own_virtual_machine() {
        let (of_owner, of_other) = (limit(Some(2), Some(8)), limit(Some(2), Some(2)));
        assert_eq!(of_owner.remaining(2), Some(6));
        assert_eq!(of_other.remaining(3), Some(0));
        assert_eq!(SharedLimit::cap(Some(2), [of_owner, of_other]), Some(8));
        assert_eq!(SharedLimit::cap(Some(2), [of_other]), Some(2));
        assert_eq!(SharedLimit::cap(Some(2), []), Some(2));
        assert_eq!(SharedLimit::cap(Some(2), [limit(Some(2), None)]), None);
        assert_eq!(SharedLimit::cap(None, []), None);
    }

    proptest! {
        /// If all virtual machines have the owner's limit, none may start a guest while they have
        /// as many together as the owner permits.
        #[test]
        fn full_machine_admits_no_guest(of_machine in 0_u32..20, guests in prop::collection::vec(0_u64..20, 1..5)) {
            let total: u64 = guests.iter().sum();
            for own in guests {
                let limit = limit(Some(of_machine), Some(of_machine));
                let remaining = u64::from(limit.remaining(total - own).expect("a limit"));
                prop_assert_eq!(remaining > own, total < u64::from(of_machine));
            }
        }
    }
}
