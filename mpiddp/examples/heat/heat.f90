! A solver of the heat equation on a square that streams its solutions: it knows one module of mpiddp, and no call of MPI.
! heat SIMULATIONS: each simulation has five random temperatures, an initial one and those of the four sides.
program heat
   use mpiddp_stream
   use, intrinsic :: iso_c_binding
   implicit none
   integer, parameter :: n = 16, steps = 100, every = 5
   real(c_float), target :: x(6), u(n, n)
   integer(c_int64_t), target :: simulation, step
   integer :: simulations, sent
   character(20) :: argument
   type(c_ptr) :: stream, sample(4)

   call get_command_argument(1, argument)
   read (argument, *) simulations
   stream = stream_open("x float32 6; u float32 16 16; simulation int64; step int64")
   sample = [c_loc(x), c_loc(u), c_loc(simulation), c_loc(step)]
   sent = 1
   do simulation = 0, simulations - 1
      call random_number(x(1:5))
      u = x(1)
      ! The last index in heat.c is the first index in Fortran.
      u(1, :) = x(4)
      u(n, :) = x(5)
      u(:, 1) = x(2)
      u(:, n) = x(3)
      do step = 1, steps
         u(2:n-1, 2:n-1) = u(2:n-1, 2:n-1) + 0.2*(u(1:n-2, 2:n-1) + u(3:n, 2:n-1) &
                         + u(2:n-1, 1:n-2) + u(2:n-1, 3:n) - 4*u(2:n-1, 2:n-1))
         x(6) = real(step)/steps
         if (mod(step, int(every, c_int64_t)) == 0) sent = stream_put(stream, sample)
         if (sent < 0) exit
      end do
      if (sent < 0) exit
   end do
   call stream_close(stream)
end program
