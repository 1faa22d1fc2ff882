! A task in Fortran with OpenMP.
!
!   waves FOLDER ROUNDS   as a task: spawns another one of itself, and in each round all threads of both go over their arrays with
!                         what the other one has sent; appends a line "ROUND SUM" to FOLDER/log for each round, and writes
!                         FOLDER/result in the end, which is after so many rounds, or, with 0, when there is a file
!                         FOLDER/enough
!
! Two runs of as many rounds write the same: all numbers are whole.
program waves
  use omp_lib
  implicit none
  include 'fpvm3.h'
  integer, parameter :: i8 = selected_int_kind(18), length = 2000000, threads = 3, tag_sum = 1
  integer(i8), parameter :: modulus = 2147483647_i8
  integer(i8), allocatable :: wave(:)
  integer :: me, info

  call pvmfmytid(me)
  if (me < 0) stop 2
  allocate (wave(length))
  call omp_set_num_threads(threads)
  if (command_argument_count() == 2) then
    call lead()
  else
    call follow()
  end if
  call pvmfexit(info)

contains

  ! All threads have a part in it.
  function passed(round, other) result(total)
    integer, intent(in) :: round
    integer(i8), intent(in) :: other
    integer(i8) :: total
    integer :: i, seen
    total = 0
    seen = 0
    !$omp parallel reduction(+:total, seen)
    seen = 1
    !$omp do
    do i = 1, length
      wave(i) = mod(wave(i) * 48271_i8 + i + other + round, modulus)
      total = total + mod(wave(i), 65521_i8)
    end do
    !$omp end do
    !$omp end parallel
    if (seen /= threads) stop 3
    total = mod(total, modulus)
  end function passed

  subroutine say(to, round, total)
    integer, intent(in) :: to, round
    integer(i8), intent(in) :: total
    integer :: words(2), done
    words = [round, int(total)]
    call pvmfinitsend(PVMDEFAULT, done)
    call pvmfpack(INTEGER4, words, 2, 1, done)
    call pvmfsend(to, tag_sum, done)
    if (done < 0) stop 4
  end subroutine say

  subroutine hear(from, round, total)
    integer, intent(in) :: from
    integer, intent(out) :: round
    integer(i8), intent(out) :: total
    integer :: words(2), done
    call pvmfrecv(from, tag_sum, done)
    if (done < 0) stop 5
    call pvmfunpack(INTEGER4, words, 2, 1, done)
    round = words(1)
    total = words(2)
  end subroutine hear

  ! A negative round is the end.
  subroutine follow()
    integer :: parent, round
    integer(i8) :: other
    call pvmfparent(parent)
    wave = 2
    do
      call hear(parent, round, other)
      if (round < 0) exit
      call say(parent, round, passed(round, other))
    end do
  end subroutine follow

  subroutine lead()
    character(len=4000) :: folder, word
    integer :: child(1), rounds, round, seen, unit, started
    integer(i8) :: total
    logical :: enough
    call get_command_argument(1, folder)
    call get_command_argument(2, word)
    read (word, *) rounds
    call pvmfspawn('waves', PVMDEFAULT, '*', 1, child, started)
    if (started /= 1) stop 6
    wave = 1
    total = 1
    round = 0
    open (newunit=unit, file=trim(folder) // '/log', position='append')
    do
      inquire (file=trim(folder) // '/enough', exist=enough)
      if (merge(round >= rounds, enough, rounds > 0)) exit
      call say(child(1), round, total)
      total = passed(round, total)
      call hear(child(1), seen, total)
      if (seen /= round) stop 7
      total = mod(total * 31 + wave(length), modulus)
      write (unit, '(i0, 1x, i0)') round, total
      flush (unit)
      round = round + 1
    end do
    close (unit)
    call say(child(1), -1, 0_i8)
    open (newunit=unit, file=trim(folder) // '/fresh')
    write (unit, '(i0)') mod(sum(mod(wave, 65521_i8)) + total, modulus)
    close (unit)
    call rename(trim(folder) // '/fresh', trim(folder) // '/result')
  end subroutine lead
end program waves
