! OpenMP in Fortran at full load: a sum whose value is known, until somebody says go.
program openmp
  use omp_lib
  implicit none
  character(len=4096) :: row, place
  integer :: rounds
  logical :: go
  integer(8) :: expected
  call get_command_argument(1, row)
  call get_command_argument(2, place)
  call omp_set_num_threads(4)
  expected = 500000500000_8
  rounds = 0
  go = .false.
  do while (.not. go)
    call check(sum_to(1000000_8) == expected)
    rounds = rounds + 1
    if (rounds == 3) then
      write (*, '(a)') 'ready'
      flush (6)
    end if
    inquire (file=trim(place)//'/go', exist=go)
    if (rounds < 3) go = .false.
  end do
  call check(sum_to(1000000_8) == expected)
  write (*, '(a)') 'right'
  flush (6)
  call exit(7)
contains
  function sum_to(last) result(total)
    integer(8), intent(in) :: last
    integer(8) :: total, i
    total = 0
    !$omp parallel do reduction(+:total) schedule(dynamic, 1000)
    do i = 1, last
      total = total + i
    end do
    !$omp end parallel do
  end function
  subroutine check(good)
    logical, intent(in) :: good
    if (.not. good) then
      write (*, '(a)') 'wrong: the sum'
      flush (6)
      call exit(1)
    end if
  end subroutine
end program
